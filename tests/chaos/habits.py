"""What can be wrong with a process: its clock, its engine, a lease that it does not watch, another message version."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from . import sabotage

Tell = Callable[..., None]
POISON = 666
"""A prompt that begins with this token is poison."""


@dataclass(frozen=True, slots=True)
class Options:
    """config: fields of WorkerConfig. tokens_per_s: of the scripted engine. clock_s: how far the wall clock is off.
    poison: what a poisoned prompt does, "process" (it dies) or "engine". sleepwalk: does not watch its own lease.
    torch: imported before it joins; that takes seconds in which no lease is renewed.
    tools: it reads tool calls in Python's syntax, without SGLang. lora: it takes LoRA adapters.
    minor, major: the version of messages it writes; a newer minor one with a field that nobody knows.
    """

    config: dict[str, Any] = field(default_factory=dict)
    tokens_per_s: float | None = None
    clock_s: float = 0.0
    poison: str = ""
    sleepwalk: bool = False
    torch: bool = False
    tools: bool = False
    lora: bool = False
    minor: int | None = None
    major: int | None = None


def adopt(options: Options, tell: Tell) -> None:
    """Become what the options say. Before the package's worker and client are imported."""
    sabotage.adopt()
    if options.clock_s:
        right = time.time
        time.time = lambda: right() + options.clock_s
    if options.minor is not None or options.major is not None:
        _another_version(options)
    if options.torch:
        import_module("torch")
    _count_refusals(tell)
    if options.tools:
        _without_sglang()
    if options.sleepwalk:
        _sleepwalk()


def _another_version(options: Options) -> None:
    from rolloutmq.messages import codec  # noqa: PLC0415

    original = codec.msgpack

    class Newer:
        """msgpack, with a field that this version does not know in every message."""

        exceptions = original.exceptions

        @staticmethod
        def packb(fields: dict[str, Any], **how: Any) -> bytes:
            return bytes(original.packb({**fields, "from_the_future": {"x": [1, 2]}}, **how))

        @staticmethod
        def unpackb(body: bytes, **how: Any) -> Any:
            fields = original.unpackb(body, **how)
            if isinstance(fields, dict):
                fields.pop("from_the_future", None)
            return fields

    codec.msgpack = Newer
    codec.MINOR = codec.MINOR if options.minor is None else options.minor
    codec.MAJOR = codec.MAJOR if options.major is None else options.major


def _count_refusals(tell: Tell) -> None:
    from rolloutmq.messages.broker.lease import Lease  # noqa: PLC0415

    original = Lease.complete

    async def complete(self: Lease, finished: Any) -> list[str]:
        states = await original(self, finished)
        if refused := states.count("fenced"):
            tell(fenced=refused)
        return states

    Lease.complete = complete  # type: ignore[method-assign]


def _without_sglang() -> None:
    """Calls in Python's syntax are read by our own code; SGLang is only asked which parsers there are."""
    from rolloutmq.worker.text import tool_calls  # noqa: PLC0415

    tool_calls.parser_names = lambda: set(tool_calls.FORMATS.values())
    tool_calls.ToolParser = lambda name, tools=(): None


def _sleepwalk() -> None:
    """It believes in its lease, whatever its clock or Redis says, until a publish of its is refused: the script alone
    stands between it and the results."""
    from rolloutmq.messages.broker.lease import Lease  # noqa: PLC0415
    from rolloutmq.messages.errors import LeaseLost  # noqa: PLC0415
    from rolloutmq.worker.lease.heartbeat import Membership  # noqa: PLC0415

    awake: set[str] = set()
    complete, claim = Lease.complete, Lease.claim

    async def believing_complete(self: Lease, finished: Any) -> list[str]:
        states = await complete(self, finished)
        if "fenced" in states:
            awake.add(self.worker_id)
        return states

    async def believing_claim(self: Lease, *limits: int) -> Any:
        try:
            return await claim(self, *limits)
        except LeaseLost:
            if self.worker_id in awake:
                raise
            return []

    async def run(self: Any, status: Any, _: Any) -> None:
        while True:
            try:
                await self.lease.heartbeat(status())
            except LeaseLost:
                if self.lease.worker_id in awake:
                    raise
            await asyncio.sleep(self._beat_s)

    Lease.complete, Lease.claim = believing_complete, believing_claim  # type: ignore[method-assign]
    Membership.run = run  # type: ignore[method-assign, assignment]


def engine(options: Options, tell: Tell) -> Any:
    """The scripted engine, with the habits asked for."""
    from rolloutmq.worker.scripted.engine import ScriptedEngine  # noqa: PLC0415

    class Engine(ScriptedEngine):
        @property
        def info(self) -> Any:
            info = super().info
            return replace(info, features=info.features | {"tools"}) if options.tools else info

        async def generate(self, request: Any) -> Any:
            if options.poison and request.token_ids[0] == POISON:
                if options.poison == "process":
                    tell(poisoned=request.request_id)
                    os.kill(os.getpid(), signal.SIGKILL)
                self.kill()
            return await super().generate(request)

    return Engine(tokens_per_s=options.tokens_per_s, lora=options.lora)


class EightTokens:
    """A tokenizer for which every text, whatever its length, is eight tokens; what is generated calls a tool."""

    def encode(self, text: str, **_how: Any) -> Any:
        import numpy as np  # noqa: PLC0415

        return np.arange(8, dtype=np.int32)

    def encode_chat(self, messages: list[dict[str, str]], **_how: Any) -> Any:
        return self.encode("")

    def decode(self, token_ids: Any, **_how: Any) -> str:
        return f"[look(at={len(token_ids)})]"
