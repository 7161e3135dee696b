"""The load on every system of the queue benchmark, and the tally of the answers.

It uses only the standard library, because peers run it in environments without this package.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

RESULT_BYTES = 128
"""Bytes that a job returns, as many as 16 tokens and their logprobs have."""


def echo(payload: bytes) -> bytes:
    """The job that every peer runs. It returns the first bytes of its payload, so that only the queue is measured."""
    return payload[:RESULT_BYTES]


@dataclass(frozen=True)
class Load:
    """One turn of one system.

    seconds: how long jobs are submitted. warmup_s: how long before that, without being counted.
    payload_bytes: of one job. It is plain ASCII, so that a system with JSON messages carries it at its size.
    window: jobs outstanding at a time. variant: one of a system's modes.
    poll_s: seconds that a client that polls for results waits before it asks again.
    rate: jobs per second that arrive, whether earlier ones are answered or not. 0 keeps the window full instead.
    """

    seconds: float = 5.0
    warmup_s: float = 1.0
    payload_bytes: int = 1024
    window: int = 512
    variant: str = ""
    poll_s: float = 0.02
    rate: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Load:
        return Load(**json.loads(text))

    def payload(self, number: int) -> bytes:
        """Return job `number`'s payload. No two are the same."""
        return b"%016x" % number + _filler(self.payload_bytes - 16)

    def answer(self, number: int, size: int) -> bytes:
        """Return the first `size` bytes of job `number`'s payload."""
        return b"%016x" % number + _filler(size - 16)


@cache
def _filler(size: int) -> bytes:
    return bytes(33 + (i * 7) % 90 for i in range(size)).replace(b'"', b"a").replace(b"\\", b"b")


class Tally:
    """Numbers the jobs, and checks that each is answered once and with the right bytes."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.open: dict[object, int] = {}
        self._next = self._answered = 0
        self._began = self._last = 0.0

    def begin(self) -> None:
        """Start a phase."""
        self._began, self._answered = time.perf_counter(), 0

    def payloads(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        """Yield (number, payload) for `seconds` from now."""
        self.begin()
        until = self._began + seconds
        while time.perf_counter() < until:
            self._next += 1
            yield self._next, self.load.payload(self._next)

    def sent(self, key: object, number: int) -> None:
        """Note that job `number` has been sent under the system's own `key`."""
        self.open[key] = number

    def answered(self, key: object, result: object, *, size: int = RESULT_BYTES) -> None:
        """Note an answer. Exits if job `key` is not open, or `result` is not the first `size` bytes of its payload."""
        number = self.open.pop(key, None)
        if number is None:
            raise SystemExit(f"job {key} was answered twice, or never sent")
        if result != self.load.answer(number, size):
            raise SystemExit(f"job {key} was answered with {result!r:.80}")
        self._answered += 1
        self._last = time.perf_counter()

    def figures(self) -> dict[str, float]:
        """Return the number of jobs in the phase, and the seconds from its start to the last answer."""
        if self.open:
            raise SystemExit(f"{len(self.open)} jobs were never answered")
        return {"jobs": self._answered, "seconds": self._last - self._began}


async def drive_lanes(load: Load, answer: Callable[[Tally, int, bytes], Awaitable[None]]) -> dict[str, float]:
    """Return the figures of `load.window` coroutines. Each sends one job at a time and waits for its answer."""
    tally = Tally(load)

    async def lane(source: Iterator[tuple[int, bytes]]) -> None:
        for number, payload in source:
            await answer(tally, number, payload)

    for seconds in (load.warmup_s, load.seconds):
        source = tally.payloads(seconds)
        await asyncio.gather(*(lane(source) for _ in range(load.window)))
        figures = tally.figures()
    return figures


def main(work: Callable[[str, Load], None], drive: Callable[[str, Load], dict[str, float]]) -> None:
    """Run one process of a system: `… worker URL LOAD` serves until SIGTERM, `… client URL LOAD` prints its tally."""
    role, url, text = sys.argv[1:]
    load = Load.from_json(text)
    if role == "worker":
        work(url, load)
    else:
        print(json.dumps(drive(url, load)))
