"""An engine that is watched: the calls of another engine, timed and counted. It is only there if metrics are on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...messages.errors import EngineDead, EngineError, RequestRefused, RolloutMQError
from ...sync.transfer import TransferOrder, TransferReport
from ..engine import Engine, EngineInfo, EngineOutput, EngineRequest, Progress, TaskOutput, TaskRequest
from .histogram import SYNC_BOUNDS, Histogram, finite

if TYPE_CHECKING:
    from ...sync.adapters import Adapter  # torch

KV_S = 5.0
"""Between two looks at the KV cache."""


class MeteredEngine:
    """Implements `Engine` by another one.

    prompt_tokens, cached_tokens: of requests that generate; the second had their keys and values in the cache.
    errors: what requests ended with: refused, failed, dead.
    syncs: seconds of successful transfers. sync_bytes: what they brought. last_bytes_per_s: of the last one.
    failed_syncs: transfers that failed. busy_since: when a request last began or ended, while some run; else 0.
    kv_use: share of the KV cache that requests hold, 0 to 1, asked every KV_S seconds; None if the engine does not say.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prompt_tokens = self.cached_tokens = self.running = 0
        self.busy_since = 0.0
        self.errors: Counter[str] = Counter(refused=0, failed=0, dead=0)
        self.syncs = Histogram(SYNC_BOUNDS)
        self.sync_bytes = self.failed_syncs = 0
        self.last_bytes_per_s = 0.0
        self.kv_use: float | None = None
        self._asking: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def start(self, *, empty: bool = False) -> None:
        await self._engine.start(empty=empty)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_for_kv_use())

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        await self._engine.close()

    async def _ask_for_kv_use(self) -> None:
        while True:
            try:
                told = await self._engine.operate("kv_use", {})
                self.kv_use = min(1.0, int(told["used"]) / max(1, int(told["tokens"])))
            except (RolloutMQError, KeyError, TypeError, ValueError):  # it is away, or cannot tell
                self.kv_use = None
            await asyncio.sleep(KV_S)

    async def generate(self, request: EngineRequest) -> EngineOutput:
        output: EngineOutput = await self._counted(self._engine.generate, request)
        self.prompt_tokens += len(request.token_ids)
        self.cached_tokens += output.cached_tokens
        return output

    async def perform(self, request: TaskRequest) -> TaskOutput:
        output: TaskOutput = await self._counted(self._engine.perform, request)
        return output

    def progress(self, request_id: str, start: int = 0) -> Progress | None:
        return self._engine.progress(request_id, start)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def abort_all(self) -> None:
        self._engine.abort_all()

    async def load_adapter(self, adapter: Adapter) -> None:
        await self._engine.load_adapter(adapter)

    async def unload_adapter(self, name: str, version: int) -> None:
        await self._engine.unload_adapter(name, version)

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._engine.operate(operation, params)

    async def healthy(self) -> bool:
        return await self._engine.healthy()

    async def _counted(self, call: Any, request: Any) -> Any:
        self.busy_since = time.monotonic()
        self.running += 1
        try:
            output = await call(request)
        except RequestRefused:
            self.errors["refused"] += 1
            raise
        except EngineError as error:
            self.errors["dead" if isinstance(error, EngineDead) else "failed"] += 1
            raise
        finally:
            self.running -= 1
            self.busy_since = time.monotonic() if self.running else 0.0
        return output

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        report = await self._engine.prepare_weights(order)
        if not report.ok:
            self.failed_syncs += 1
        return report

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        report = await self._engine.commit_weights(order)
        if not report.ok:
            self.failed_syncs += 1
            return report
        seconds = finite(report.seconds)
        self.syncs.observe(seconds)
        self.sync_bytes += report.nbytes
        self.last_bytes_per_s = report.nbytes / seconds if seconds > 0 else 0.0
        return report
