"""Saves what long samples have generated so far: a worker's death then costs seconds of generation, not minutes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from ...messages.broker import MAX_CALL_TOKENS, Lease, Piece
from ..engine import Progress
from ..jobs import HeldJobs, Run, SampleRun

log = logging.getLogger(__name__)
MAX_PIECES = 256


class Checkpoints:
    """Every unfinished sample is saved about every `every_s` seconds; what was saved before is not sent again.

    Those of streamed jobs are saved all the time, see streaming.py.

    progress(request id, start): what the engine has of a running request. on_fenced(job id, attempt): the job is not
    this worker's any more.
    """

    def __init__(
        self,
        held: HeldJobs,
        every_s: float,
        progress: Callable[[str, int], Progress | None],
        on_fenced: Callable[[str, int], None],
    ) -> None:
        self._held, self._every_s = held, every_s
        self._progress, self._on_fenced = progress, on_fenced

    async def run(self, lease: Lease) -> None:
        """Save until cancelled. A Redis that does not answer is asked again at the next round."""
        while True:
            await asyncio.sleep(min(1.0, self._every_s / 4))
            while batch := self._due():
                try:
                    await save(lease, batch, self._on_fenced)
                except (RedisError, OSError) as error:
                    log.warning("checkpoints could not be saved: %s", error)
                    break

    def _due(self) -> list[tuple[Run, Piece]]:
        due: list[tuple[Run, Piece]] = []
        tokens = 0
        before = time.monotonic() - self._every_s
        for held in self._held:
            for sample in held.samples.values():
                if sample.saved_at > before or sample.finish_reason is not None or sample.dropped:
                    continue
                if isinstance(sample, SampleRun) and sample.stream is not None:
                    continue
                piece = sample.unsaved(self._progress)
                if piece is None:
                    continue
                due.append((sample, piece))
                tokens += len(piece.partial.token_ids)
                if len(due) >= MAX_PIECES or tokens >= MAX_CALL_TOKENS:
                    return due
        return due


async def save(lease: Lease, batch: Sequence[tuple[Run, Piece]], on_fenced: Callable[[str, int], None]) -> None:
    """Save one piece of each of these samples. Raises RedisError or OSError; then it may be done again."""
    states = await lease.checkpoint([piece for _, piece in batch])
    for (sample, piece), state in zip(batch, states, strict=True):
        if state == "ok":
            sample.keep_saved(piece)
        elif state == "gap":
            sample.save_anew()
        else:
            on_fenced(piece.job_id, piece.attempt)
