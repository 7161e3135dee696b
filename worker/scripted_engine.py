"""An engine that computes its answers from a hash: no model, no GPU, every token predictable.

For examining the queue and everything around it: which tokens a sample must have follows from its request id, the
position and the weights version, so an observer can tell whether a continuation started where the last leg ended and
whether a version tag is true. It runs real weight transfers (when torch is there) and keeps the tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..messages.errors import EngineDead, RequestRefused
from ..sync.transfer import TransferOrder, TransferReport
from .engine import EngineInfo, EngineOutput, EngineRequest, Progress

VOCAB = 50_000
CONTEXT = 1 << 20


def scripted_token(stream: str, position: int, version: int) -> int:
    """Token `position` (counted from the end of the prompt) of a sample; stream: job id and sample number."""
    digest = hashlib.blake2b(f"{stream}:{position}:{version}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def scripted_logprob(token: int) -> float:
    """The log-probability that belongs to a scripted token."""
    return -0.001 * (token % 1000) - 0.001


def _generated(request: EngineRequest, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The first `count` tokens of this leg and their logprobs."""
    # Positions go on where the prompt of this leg ends, so a continuation is the same stream of tokens.
    stream, first, version = request.request_id[:36], len(request.token_ids), int(request.cache_key)
    tokens = [scripted_token(stream, first + i, version) for i in range(count)]
    logprobs = [scripted_logprob(token) for token in tokens]
    return np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32)


def _echoed(request: EngineRequest, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    tokens = request.token_ids
    return tokens[:count] if count <= len(tokens) else np.resize(tokens, count), np.full(count, -1.0, np.float32)


class ScriptedEngine:
    """Implements `Engine`. `tokens_per_s` is the speed of one sample; None answers at once.

    echo: the answer is the prompt's first tokens (the prompt again and again if it is shorter), each with the logprob
    -1, instead of tokens from a hash, which cost a microsecond each: for measuring what is around the engine.
    """

    def __init__(self, tokens_per_s: float | None = None, start_s: float = 0.0, *, echo: bool = False) -> None:
        self.tokens_per_s = tokens_per_s
        self._script = _echoed if echo else _generated
        self.start_s = start_s
        self.weights: Mapping[str, Any] = {}
        self.starts = 0
        self._alive = False
        self._aborts: dict[str, asyncio.Event] = {}
        self._began: dict[str, tuple[EngineRequest, float]] = {}
        self._death = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="scripted",
            version="1",
            model="scripted",
            dtype="float32",
            device="cpu",
            vocab_size=VOCAB,
            context_length=CONTEXT,
        )

    async def start(self) -> None:
        if self.start_s:
            await asyncio.sleep(self.start_s)
        self.starts += 1
        self._death = asyncio.Event()
        self._alive = True

    async def generate(self, request: EngineRequest) -> EngineOutput:
        if not self._alive:
            raise EngineDead("the scripted engine is not running")
        limit = CONTEXT - len(request.token_ids)
        if request.max_new_tokens > limit:
            raise RequestRefused(f"max_new_tokens={request.max_new_tokens}: at most {limit} fit behind this prompt")
        began, count = time.monotonic(), request.max_new_tokens
        self._began[request.request_id] = request, began
        try:
            if self.tokens_per_s is None:
                await asyncio.sleep(0)
            elif await self._stopped_early(request.request_id, count / self.tokens_per_s):
                count = min(count, int((time.monotonic() - began) * self.tokens_per_s))
        finally:
            del self._began[request.request_id]
        if not self._alive:
            raise EngineDead("the scripted engine was killed")
        token_ids, logprobs = self._script(request, count)
        return EngineOutput(token_ids, logprobs, "length" if count == request.max_new_tokens else "abort")

    def progress(self, request_id: str, start: int = 0) -> Progress | None:
        if request_id not in self._began or self.tokens_per_s is None:
            return None
        request, began = self._began[request_id]
        count = min(request.max_new_tokens, int((time.monotonic() - began) * self.tokens_per_s))
        token_ids, logprobs = self._script(request, count)
        return Progress(token_ids[start:], logprobs[start:])

    async def _stopped_early(self, request_id: str, seconds: float) -> bool:
        event = self._aborts[request_id] = asyncio.Event()
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._death.wait())]
        try:
            done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            for wait in waits:
                wait.cancel()
            del self._aborts[request_id]

    def abort(self, request_id: str) -> None:
        if event := self._aborts.get(request_id):
            event.set()

    def abort_all(self) -> None:
        for event in self._aborts.values():
            event.set()

    async def load_weights(self, order: TransferOrder) -> TransferReport:
        from ..sync.loader import receive_tensors  # noqa: PLC0415 – torch is needed only when weights are published

        if not self._alive:
            raise EngineDead("the scripted engine is not running")
        report, tensors = await asyncio.to_thread(receive_tensors, order, 0)
        if report.ok:
            self.weights = tensors
        return report

    def kill(self) -> None:
        """Die as a crashed engine does: whatever runs raises EngineDead."""
        self._alive = False
        self._death.set()

    async def healthy(self) -> bool:
        return self._alive

    async def close(self) -> None:
        self.kill()
