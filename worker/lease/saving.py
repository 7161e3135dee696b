"""Saves what running samples have generated so far, at intervals or, for streamed jobs, as often as somebody can watch.

A worker's death then costs seconds of generation, not minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError

from ...messages.broker import AWAY, Lease, Piece
from ...messages.model import GenerateJob
from ...messages.redis import name_once
from ..engine import Generated
from ..jobs import HeldJob, HeldJobs, SampleRun
from ..text import SampleStream
from .batches import batches, each

log = logging.getLogger(__name__)
EVERY_S = 0.05
"""Seconds between two looks at what the engine has: the tokens that came meanwhile are one piece."""
MOST_PIECES = 512
"""A sample of so many pieces is saved anew as one: many small pieces cost more to keep than to write again."""
ANEW = 8
"""So many samples are saved anew at a look: Redis deletes all their pieces in one call."""


class Saving:
    """Saves every unfinished sample about every `every_s` seconds, and sends no token twice.

    Samples of streamed jobs are saved all the time, and their clients are told of each piece.

    progress(request id, start): what the engine has of a running request.
    """

    def __init__(self, held: HeldJobs, every_s: float, progress: Callable[[str, int], Generated | None]) -> None:
        self._held, self._every_s, self._progress = held, every_s, progress
        self._streamed: list[SampleRun] = []
        self._some = asyncio.Event()

    def stream(self, held: HeldJob, decode: Callable[[npt.NDArray[np.int32]], str]) -> None:
        """Stream the samples of a job that asks for it. Comes before they run."""
        if not isinstance(held.job, GenerateJob) or not held.job.stream:
            return
        for sample in held.samples.values():
            if isinstance(sample, SampleRun):
                sample.stream = SampleStream(held.job, None if held.job.token_ids is not None else decode)
                sample.stream.text(0, sample.tokens)  # of earlier workers
                self._streamed.append(sample)
        self._some.set()

    async def save_due(self, lease: Lease) -> None:
        """Save what is not streamed until cancelled. If Redis does not answer, the next round tries again."""
        while True:
            await asyncio.sleep(min(1.0, self._every_s / 4))
            while batch := next(batches(self._due(), _bytes), None):  # one at a time: pieces can be large
                try:
                    await save(lease, batch, self._held)
                except (RedisError, OSError) as error:
                    log.warning("checkpoints could not be saved: %s", error)
                    break

    async def save_streamed(self, lease: Lease) -> None:
        """Save what is streamed until cancelled. Pieces grow while Redis does not answer."""
        while True:
            await self._some.wait()
            began = time.monotonic()
            self._streamed = [one for one in self._streamed if one.finish_reason is None and not one.dropped]
            if not self._streamed:
                self._some.clear()
                continue
            try:
                for batch in list(batches(self._new(), _bytes)):
                    await save(lease, batch, self._held)
            except (RedisError, OSError) as error:
                log.warning("what is streamed could not be saved: %s", error)
            spent = time.monotonic() - began
            await asyncio.sleep(min(1.0, max(EVERY_S - spent, 2 * spent)))  # a third of this thread's time at most

    def _due(self) -> Iterator[tuple[SampleRun, Piece]]:
        before = time.monotonic() - self._every_s
        for sample in (one for job in self._held for one in job.samples.values() if isinstance(one, SampleRun)):
            if (
                sample.stream is not None
                or sample.saved_at > before
                or sample.finish_reason is not None
                or sample.dropped
            ):
                continue
            if (piece := sample.unsaved(self._progress)) is not None:
                yield sample, piece

    def _new(self) -> Iterator[tuple[SampleRun, Piece]]:
        anew = 0
        for sample in self._streamed:
            if sample.pieces >= MOST_PIECES and anew < ANEW:
                anew += 1
                sample.save_anew()
            if (piece := sample.unsaved(self._progress)) is not None:
                yield sample, piece


def _bytes(saved: tuple[SampleRun, Piece]) -> int:
    return len(saved[1].payload)


async def save(lease: Lease, batch: Sequence[tuple[SampleRun, Piece]], held: HeldJobs) -> None:
    """Save one piece of each of these samples, and drop jobs that are another worker's by now.

    Raises RedisError or OSError; then it may be done again.
    """

    async def send(some: Sequence[tuple[SampleRun, Piece]]) -> None:
        states = await lease.checkpoint([piece for _, piece in some])
        for (sample, piece), state in zip(some, states, strict=True):
            if state == "ok":
                sample.keep_saved(piece)
            elif state == "gap":
                sample.save_anew()
            elif state == AWAY:
                sample.saved_at = time.monotonic()  # its shard is away: the next time, with what comes until then
            elif state == "full":
                sample.saved_at = time.monotonic()  # not tried again at once
                name_once("the pool has no room for what unfinished samples have generated: a lost worker costs it")
            else:
                held.drop(piece.job_id, piece.attempt)

    def leave(one: tuple[SampleRun, Piece], _: Exception) -> None:
        one[0].saved_at = time.monotonic()  # not tried again at once

    await each(list(batch), send, leave)
