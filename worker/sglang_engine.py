"""The engine protocol on real SGLang, inside the worker's process and on its event loop."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..messages.errors import EngineDead, EngineError, RequestRefused
from ..sync.transfer import TransferOrder, TransferReport
from . import sglang_lora
from .engine import EngineInfo, EngineOutput, EngineRequest, Progress
from .sglang_config import SGLangConfig
from .sglang_features import features
from .sglang_requests import check_request, engine_output
from .sglang_run import SGLangRun
from .sglang_stock_updates import StockUpdates
from .sglang_weights import commit_weights, prepare_weights, send_weights

if TYPE_CHECKING:
    from ..sync.adapter_format import Adapter  # torch

__all__ = ["SGLangConfig", "SGLangEngine"]


class SGLangEngine:
    """SGLang behind :class:`~rolloutmq.worker.engine.Engine`; one may run in a process at a time.

    Log-probabilities are those of the model's own distribution, with logit bias and penalties but before temperature
    and truncation.
    """

    _weight_loader: ClassVar[str] = "rolloutmq.worker.sglang_control.commit"

    def __init__(self, config: SGLangConfig) -> None:
        self.config = config
        self._info: EngineInfo | None = None
        self._run: SGLangRun | None = None
        self._stock: StockUpdates | None = None

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`, and still after `close`."""
        if self._info is None:
            raise EngineError("the engine has not been started")
        return self._info

    async def start(self) -> None:
        """See the protocol; seconds on a tiny model, minutes on a large one."""
        if self._run is not None:
            if self._run.alive:
                raise EngineError("the engine is already running")
            await self.close()
        self._run, self._stock = SGLangRun(self.config, self._weight_loader), None
        try:
            info = await self._run.open()
            self._info = replace(info, features=features(self.config))
        except BaseException:
            self._run = None
            raise

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """See the protocol."""
        from . import sglang_compat  # noqa: PLC0415  (seconds of imports; loaded by start)

        run = self._current()
        check_request(request, self.info)
        if request.adapter and not self.info.adapters.has(request.adapter, request.adapter_version):
            raise EngineError(f"adapter {request.adapter}@{request.adapter_version} is not in this engine")
        try:
            answer = await sglang_compat.generate(run.manager, request)
        except ValueError as error:
            run.check()
            raise RequestRefused(f"SGLang refused the request: {error}") from error
        except Exception as error:
            run.check()
            raise EngineError(f"SGLang failed on the request: {error}") from error
        run.check()
        return engine_output(answer, sglang_compat.output_logprobs(answer) if answer else [])

    def progress(self, request_id: str, start: int = 0) -> Progress | None:
        """See the protocol. SGLang reports what it has every 50 tokens, streaming or not."""
        from . import sglang_compat  # noqa: PLC0415

        if self._run is None or not self._run.ready:
            return None
        if (found := sglang_compat.generated_so_far(self._run.manager, request_id, start)) is None:
            return None
        return Progress(np.array(found[0], dtype=np.int32), np.array(found[1], dtype=np.float32))

    def abort(self, request_id: str) -> None:
        """See the protocol."""
        if self._run is not None and self._run.ready:
            self._run.manager.abort_request(request_id)

    def abort_all(self) -> None:
        """See the protocol."""
        if self._run is not None and self._run.ready:
            self._run.manager.abort_request(abort_all=True)

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        """See the protocol. A caller that is cancelled does not stop the transfer, which has its own deadline."""
        run = self._current()
        return await run.race(prepare_weights(run.control, order, tp_size=self.config.tp_size))

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        """See the protocol. A caller that is cancelled does not stop the transfer, which has its own deadline."""
        run, loader, tp_size = self._current(), self._weight_loader, self.config.tp_size
        if order.transport == "stock":
            self._stock = self._stock or StockUpdates(run.manager, run.control, loader=loader, tp_size=tp_size)
            return await run.race(self._stock.commit(order))
        return await run.race(commit_weights(run.manager, run.control, order, loader=loader, tp_size=tp_size))

    async def send_weights(self, order: TransferOrder) -> TransferReport:
        """See the protocol. A caller that is cancelled does not stop it: the sender's store, or its deadline, does."""
        run = self._current()
        return await run.race(send_weights(run.control, order, tp_size=self.config.tp_size))

    async def load_adapter(self, adapter: Adapter) -> None:
        """See the protocol. A caller that is cancelled does not stop it."""
        run = self._current()
        await run.race(sglang_lora.load(run.manager, adapter, model=self.config.model, tp_size=self.config.tp_size))

    async def unload_adapter(self, name: str, version: int) -> None:
        """See the protocol."""
        run = self._current()
        await run.race(sglang_lora.unload(run.manager, name, version))

    async def healthy(self) -> bool:
        """See the protocol."""
        return self._run is not None and self._run.alive

    async def close(self) -> None:
        """See the protocol. Python's own resource tracker, one per process and not SGLang's, stays."""
        run, self._run = self._run, None
        if run is not None:
            await run.close()

    def _current(self) -> SGLangRun:
        if self._run is None:
            raise EngineDead("the engine is not running")
        return self._run
