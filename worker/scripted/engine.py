"""An engine that computes its answers from a hash: no model, no GPU, every token predictable.

For examining the queue and everything around it: which tokens a sample must have follows from its request id, the
position and the weights version, so an observer can tell whether a continuation started where the last leg ended and
whether a version tag is true. It runs real weight transfers (when torch is there) and keeps the tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import EngineDead, EngineError, RequestRefused
from ...sync.transfer import TransferOrder, TransferReport
from ..engine import (
    FEATURE,
    TASK_FEATURES,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    Generated,
    LoadedAdapters,
    TaskOutput,
    TaskRequest,
)
from .ops import ScriptedOps

VOCAB = 50_000
CONTEXT = 1 << 20


def scripted_token(stream: str, position: int, version: int, adapter: str = "") -> int:
    """Token `position` (counted from the end of the prompt) of a sample.

    stream: job id and sample number. adapter: <name>@<version> of the one it is sampled with.
    """
    digest = hashlib.blake2b(f"{stream}:{position}:{version}{adapter}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def scripted_logprob(token: int) -> float:
    """The log-probability that belongs to a scripted token."""
    return -0.001 * (token % 1000) - 0.001


def scripted_values(request: TaskRequest) -> npt.NDArray[np.float32]:
    """Of a score, what `scripted_logprob` says of each token; else number, sum and version of the input."""
    ids = request.token_ids
    if request.task == "score":
        return np.array([scripted_logprob(int(token)) for token in ids[request.start :]], dtype=np.float32)
    return np.array([len(ids), ids.sum(), int(request.cache_key)], dtype=np.float32)[: request.dimensions]


Switches = list[tuple[int, int]]
"""(token, version) pairs: from this token of a leg on it is sampled by that version."""


def _generated(
    request: EngineRequest, count: int, switches: Switches
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The first `count` tokens of this leg and their logprobs."""
    # Positions go on where the prompt of this leg ends, so a continuation is the same stream of tokens.
    stream, first = request.request_id[:36], len(request.token_ids)
    key, _, adapter = request.cache_key.partition("/")
    versions = [int(key)] * count
    for token, version in switches:
        versions[token:] = [version] * max(0, count - token)
    tokens = [scripted_token(stream, first + i, version, adapter) for i, version in enumerate(versions)]
    logprobs = [scripted_logprob(token) for token in tokens]
    return np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32)


def _echoed(
    request: EngineRequest, count: int, _switches: Switches
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    tokens = request.token_ids
    return tokens[:count] if count <= len(tokens) else np.resize(tokens, count), np.full(count, -1.0, np.float32)


class ScriptedEngine:
    """Implements `Engine`. `tokens_per_s` is the speed of one sample; None answers at once.

    prefill_per_s: tokens a second of prompts, and of what earlier legs had generated, one request after another; None
    reads at once. It matters only with `tokens_per_s`.
    tasks: which features it has for jobs that generate nothing. lora: whether it takes LoRA adapters; a token then
    depends on the adapter's name and version, too.
    echo: the answer is the prompt's first tokens (the prompt again and again if it is shorter), each with the logprob
    -1, instead of tokens from a hash, which cost a microsecond each: for measuring what is around the engine.
    ops: its memory, caches and so on. memory_for: more requests than that at once are out of memory.
    """

    def __init__(
        self, tokens_per_s: float | None = None, start_s: float = 0.0, *, echo: bool = False, lora: bool = False
    ) -> None:
        self.tokens_per_s = tokens_per_s
        self.lora = lora
        self.tasks = frozenset({TASK_FEATURES["score"]})
        self.loaded: dict[tuple[str, int], Any] = {}
        self._adapters = LoadedAdapters()
        self._script = _echoed if echo else _generated
        self.start_s = start_s
        self.weights: Mapping[str, Any] = {}
        self.starts = 0
        self.empty = False
        self._alive = False
        self._aborts: dict[str, asyncio.Event] = {}
        self._running: dict[str, tuple[EngineRequest, float, Switches]] = {}
        self._receiver: Any = None
        self._death = asyncio.Event()
        self.memory_for: int | None = None
        self.prefill_per_s: float | None = None
        self._read_at = 0.0  # when the newest request has been read
        self.ops = ScriptedOps(self)

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
            features=frozenset({"stream", *self.tasks, *({FEATURE} if self.lora else ())}),
            adapters=self._adapters,
            empty=self.empty,
        )

    async def start(self, *, empty: bool = False) -> None:
        self.empty = empty
        if self.start_s:
            await asyncio.sleep(self.start_s)
        self.starts += 1
        self._receiver = None
        self.loaded, self._adapters = {}, LoadedAdapters()
        self._death = asyncio.Event()
        before, self.ops = self.ops, ScriptedOps(self)
        self.ops.keeps_weights, self.ops.can_sleep = before.keeps_weights, before.can_sleep
        self._alive = True

    @staticmethod
    def _check(runs: bool) -> None:
        if not runs:
            raise EngineDead("the scripted engine is not running")

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self._check(self._alive)
        limit = CONTEXT - len(request.token_ids)
        if request.max_new_tokens > limit:
            raise RequestRefused(f"max_new_tokens={request.max_new_tokens}: at most {limit} fit behind this prompt")
        if request.adapter and (request.adapter, request.adapter_version) not in self.loaded:
            raise EngineError(f"adapter {request.adapter}@{request.adapter_version} is not loaded")
        self.ops.check()
        if self.memory_for is not None and len(self._running) >= self.memory_for:
            raise EngineError("out of memory, says the script")
        began, count = self.ops.clock(), request.max_new_tokens
        if self.prefill_per_s is not None:
            began = self._read_at = max(began, self._read_at) + len(request.token_ids) / self.prefill_per_s
        switches: Switches = []
        self._running[request.request_id] = request, began, switches
        try:
            if self.tokens_per_s is None:
                await asyncio.sleep(0)
            elif await self._stopped_early(request.request_id, began - self.ops.clock() + count / self.tokens_per_s):
                count = min(count, max(0, int((self.ops.clock() - began) * self.tokens_per_s)))
                if not self._aborts:  # what was being read is forgotten
                    self._read_at = 0.0
        finally:
            del self._running[request.request_id]
        if not self._alive:
            raise EngineDead("the scripted engine was killed")
        token_ids, logprobs = self._script(request, count, switches)
        return EngineOutput(token_ids, logprobs, "length" if count == request.max_new_tokens else "abort")

    async def perform(self, request: TaskRequest) -> TaskOutput:
        self._check(self._alive)
        await asyncio.sleep(0)
        return TaskOutput(scripted_values(request), finished=True)

    def progress(self, request_id: str, start: int = 0) -> Generated | None:
        if request_id not in self._running or self.tokens_per_s is None:
            return None
        request, _, switches = self._running[request_id]
        token_ids, logprobs = self._script(request, self._sampled(request_id), switches)
        return Generated(token_ids[start:], logprobs[start:])

    def _sampled(self, request_id: str) -> int:
        """Tokens a running request has by now."""
        request, began, _ = self._running[request_id]
        return min(request.max_new_tokens, max(0, int((self.ops.clock() - began) * (self.tokens_per_s or 0.0))))

    async def _stopped_early(self, request_id: str, seconds: float) -> bool:
        event = self._aborts[request_id] = asyncio.Event()
        try:
            return await self.ops.wait(seconds, event, self._death)
        finally:
            del self._aborts[request_id]

    def abort(self, request_id: str) -> None:
        if event := self._aborts.get(request_id):
            event.set()

    def abort_all(self) -> None:
        for event in self._aborts.values():
            event.set()

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        import torch  # noqa: PLC0415 – needed only when weights are published

        from ...sync.receive import Receiver  # noqa: PLC0415

        self._check(self._alive)
        self._receiver = self.ops.receiver = self._receiver or Receiver(torch.device("cpu"), recorded=False)
        report: TransferReport = await asyncio.to_thread(self._receiver.prepare, order)
        return report

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        self._check(self._alive and self._receiver is not None)
        report: TransferReport = await asyncio.to_thread(self._receiver.commit, order.epoch, self)
        self.ops.garbage = self.ops.garbage and not report.ok
        if order.mode != "in_place" or not report.ok:
            return report
        counts = {request_id: self._sampled(request_id) for request_id in self._running}
        for request_id, count in counts.items():
            self._running[request_id][2].append((count, order.version))
        return replace(report, switched=counts)

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Called by the receiver with a version's tensors, bucket by bucket."""
        self.weights = {**self.weights, **{name: tensor.clone() for name, tensor in tensors}}

    async def load_adapter(self, adapter: Any) -> None:
        self._check(self._alive)
        if not self.lora:
            raise EngineError("the scripted engine was started without LoRA")
        self.loaded[adapter.name, adapter.version] = adapter

    async def unload_adapter(self, name: str, version: int) -> None:
        if any((one.adapter, one.adapter_version) == (name, version) for one, *_ in self._running.values()):
            raise EngineError(f"adapter {name}@{version} is in use")
        del self.loaded[name, version]

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check(self._alive)
        return await self.ops.operate(operation, params)

    def kill(self) -> None:
        """Die as a crashed engine does: whatever runs raises EngineDead."""
        self._alive = False
        self._death.set()

    async def healthy(self) -> bool:
        return self._alive

    async def close(self) -> None:
        self.kill()
