"""The package with one of its safeguards taken out, in every process of the suite: which scenarios find it?

CHAOS_SABOTAGE names it. Each entry says how the safeguard is taken out, and which scenario has to notice that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

VARIABLE = "CHAOS_SABOTAGE"


@dataclass(frozen=True, slots=True)
class Sabotage:
    """take_out: done once in each process. scenario: what finds it. says: a pattern of one of its violations."""

    take_out: Callable[[], None]
    scenario: str
    says: str


def _script(script: str, pattern: str, instead: str) -> Callable[[], None]:
    """Another text in a Lua script ("lib": in all of them)."""

    def take_out() -> None:
        from rolloutmq.messages.scripts import runner  # noqa: PLC0415

        real = runner.script_source

        def source(name: str, *preamble: str) -> str:
            text = real(name, *preamble)
            if script not in {"lib", name}:
                return text
            text, count = re.subn(pattern, lambda _: instead, text)
            assert count, f"{script}.lua does not contain {pattern} any more: find another way to take it out"
            return text

        runner.script_source = source

    return take_out


SABOTAGES: dict[str, Sabotage] = {
    "the owner is not checked": Sabotage(
        _script("complete", r"or f\[2\] ~= worker or f\[3\] ~= attempt\n", "\n"),
        "freeze_worker_past_lease",
        "it belonged to|was published in state",
    ),
    "a tombstone without TTL": Sabotage(
        _script("lib", r"redis.call\('EXPIRE', key, TOMBSTONE_S\)", ""), "kill_matrix", "no TTL, and not on the list"
    ),
}


def adopt() -> None:
    """Take out what the environment names. Before clients and workers are made."""
    if name := os.environ.get(VARIABLE):
        SABOTAGES[name].take_out()
