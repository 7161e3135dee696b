"""Turns of a recorded session as Redis might have them."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import numpy as np
from support.specimens.turns import turn

from fuzz.mutator import mutated, mutated_bytes, pack, unpack
from fuzz.stub import Answers
from rolloutmq.messages import Broker, MessageError, encode
from rolloutmq.messages.broker import RecordedSessions
from rolloutmq.producer.episodes import RecordedSession

GOOD = encode(turn([1, 2, 3], [4, 5]))
BEGINS = (b"", b"0 5", b"0 3", b"1 8", b"2 1", b"9 1", b"0 9999999", b"-1 3", b"0", b"\xff", b"0 5 5", b"1 0")
ENDS = (b"", b"3:" + b"0" * 32, b"\xff\xfe", b"9" * 5000, b"9999999:" + b"f" * 32, b"0:" + b"a" * 32 + b" 3:x")
COUNTS = (0, 1, 2, 3, 4, 10**15)


def make_turns(rng: Random) -> Any:
    frames = []
    for _ in range(rng.randint(1, 4)):
        broken = GOOD[:3] + pack(mutated(unpack(GOOD[3:]), rng)) if rng.random() < 0.8 else mutated_bytes(GOOD, rng)
        frames += [rng.choice(BEGINS), rng.choice((GOOD, broken))]
    return [rng.choice((len(frames) // 2, rng.choice(COUNTS))), frames, [rng.choice(ENDS) for _ in range(3)]]


async def run_turns(case: Any) -> None:
    turns, frames, ends = case
    answers: dict[str, Any] = {"execute_command": [turns, *frames]}
    store = RecordedSessions(Broker(Answers(answers), "p"))  # type: ignore[arg-type]
    with contextlib.suppress(MessageError):
        taken = RecordedSession("default", "s", tuple(await store.take("default", "s")))
        sampled = sum(len(one.token_ids) for one in taken.turns)
        assert sum(int(row.mask.sum()) for row in taken.rows()) == sampled
        assert all(parent is None or 0 <= parent < len(taken.turns) for parent in taken.parents)
    answers["execute_command"] = lambda *args: b"ok" if len(args) > 10 else [0, *ends]
    await store.record("default", "s", "k", turn(np.arange(3), [4]))
