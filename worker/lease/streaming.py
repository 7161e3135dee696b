"""Streams what is being generated: the pieces in which samples are saved, made as often as somebody can watch them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError

from ...messages.broker import MAX_CALL_TOKENS, Lease, Piece
from ...messages.model import GenerateJob
from ..engine import Progress
from ..jobs import HeldJob, SampleRun
from ..text import SampleStream
from .saving import MAX_PIECES, save

log = logging.getLogger(__name__)
EVERY_S = 0.05
"""Between two looks at what the engine has: what came meanwhile is one piece."""
MOST_PIECES = 512
"""Then all of the sample becomes one piece: many small ones in one record cost more to keep than to write again."""


class Streaming:
    """Saves the samples of streamed jobs all the time and has their clients told. Does nothing while there are none."""

    def __init__(self, progress: Callable[[str, int], Progress | None], on_fenced: Callable[[str, int], None]) -> None:
        self._progress, self._on_fenced = progress, on_fenced
        self._samples: list[SampleRun] = []
        self._some = asyncio.Event()

    def add(self, held: HeldJob, decode: Callable[[npt.NDArray[np.int32]], str]) -> None:
        """Stream a job's samples, if it asks for it; before they run."""
        if not isinstance(held.job, GenerateJob) or not held.job.stream:
            return
        for sample in held.samples.values():
            if isinstance(sample, SampleRun):
                sample.stream = SampleStream(held.job, None if held.job.token_ids is not None else decode)
                sample.stream.text(0, sample.tokens)  # of earlier workers
                self._samples.append(sample)
        self._some.set()

    async def run(self, lease: Lease) -> None:
        """Stream until cancelled. While Redis does not answer the next pieces grow."""
        while True:
            await self._some.wait()
            began = time.monotonic()
            self._samples = [one for one in self._samples if one.finish_reason is None and not one.dropped]
            if not self._samples:
                self._some.clear()
                continue
            try:
                for batch in self._batches():
                    await save(lease, batch, self._on_fenced)
            except (RedisError, OSError) as error:
                log.warning("what is streamed could not be saved: %s", error)
            spent = time.monotonic() - began
            await asyncio.sleep(min(1.0, max(EVERY_S - spent, 2 * spent)))  # a third of this thread's time at most

    def _batches(self) -> list[list[tuple[SampleRun, Piece]]]:
        batches: list[list[tuple[SampleRun, Piece]]] = [[]]
        tokens = 0
        for sample in self._samples:
            if sample.pieces >= MOST_PIECES:
                sample.save_anew()
            if (piece := sample.unsaved(self._progress)) is None:
                continue
            if len(batches[-1]) >= MAX_PIECES or tokens >= MAX_CALL_TOKENS:
                batches.append([])
                tokens = 0
            batches[-1].append((sample, piece))
            tokens += len(piece.partial.token_ids)
        return [batch for batch in batches if batch]
