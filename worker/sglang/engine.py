"""The engine protocol on real SGLang, inside the worker's process and on its event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...messages.errors import EngineDead, EngineError, RequestRefused
from ...sync.transfer import TransferOrder, TransferReport
from ..engine import (
    NOTHING_MORE,
    POOLING_FEATURES,
    TASK_FEATURES,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    Progress,
    TaskOutput,
    TaskRequest,
)
from ..jobs import media
from ..logit_processors import Registry
from . import lora as sglang_lora
from . import operations as sglang_ops
from . import reward_head
from .arrays import Shapes
from .config import SGLangConfig
from .embedding import pooled
from .features import features
from .inside import grammar as sglang_grammar
from .inside import stops as sglang_stops
from .requests import check_request, check_wanted, engine_output, progress_of
from .run import SGLangRun
from .scoring import scored
from .weights import commit_weights, prepare_weights, send_weights

if TYPE_CHECKING:
    from ...sync.adapters import Adapter  # torch

__all__ = ["SGLangConfig", "SGLangEngine"]


class SGLangEngine:
    """SGLang behind :class:`~rolloutmq.worker.engine.protocol.Engine`; one may run in a process at a time.

    Log-probabilities are those of the model's own distribution, with logit bias and penalties but before temperature
    and truncation.
    """

    _weight_loader: ClassVar[str] = "rolloutmq.worker.sglang.inside.control.commit"

    def __init__(self, config: SGLangConfig) -> None:
        self.config = config
        self._info: EngineInfo | None = None
        self._run: SGLangRun | None = None
        self._processors = Registry(config.logit_processors)
        self._shapes = Shapes()
        self._asking: dict[str, EngineRequest] = {}  # running requests that ask for more than tokens

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`, and still after `close`."""
        if self._info is None:
            raise EngineError("the engine has not been started")
        return self._info

    async def start(self) -> None:
        """See the protocol; seconds on a tiny model, minutes on a large one. Raises ConfigError, too."""
        if self._run is not None:
            if self._run.alive:
                raise EngineError("the engine is already running")
            await self.close()
        self._run = SGLangRun(self.config, self._weight_loader)
        try:
            self._processors.load_own()
            info = await self._run.open()
            found = features(self.config) | media.features(self._run.manager, info.device)
            self._info = replace(info, features=found)
            from . import compat as sglang_compat  # noqa: PLC0415  (seconds of imports, done by `open` in a thread)

            self._shapes = sglang_compat.shapes_of(self._run.manager)
            if self.config.task == "reward":
                await reward_head.settle(self._run.manager, self.config.model, self.config.tp_size)
        except BaseException:
            self._run = None
            raise

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """See the protocol."""
        from . import compat as sglang_compat  # noqa: PLC0415  (seconds of imports; loaded by start)

        run = self._current()
        if self.info.features & POOLING_FEATURES:  # it would end the scheduler
            raise RequestRefused(f"generate: this engine was started for task={self.config.task!r}")
        check_request(request, self.info)
        sglang_stops.check(request, self.info)
        sglang_grammar.check(request, self.info)
        seeded = self.config.deterministic
        check_wanted(request, self.info, self._shapes, self._processors, deterministic=seeded)
        if request.adapter and not self.info.adapters.has(request.adapter, request.adapter_version):
            raise EngineError(f"adapter {request.adapter}@{request.adapter_version} is not in this engine")
        if request.wanted is not NOTHING_MORE:
            self._asking[request.request_id] = request
        try:
            answer = await sglang_compat.generate(run.manager, request, deterministic=seeded)
        except ValueError as error:
            run.check()
            refusal = sglang_grammar.refusal(request, str(error))
            raise RequestRefused(f"SGLang refused the request: {refusal}") from error
        except Exception as error:
            run.check()
            raise EngineError(f"SGLang failed on the request: {error}") from error
        finally:
            self._asking.pop(request.request_id, None)
        run.check()
        logprobs, state = ([], None) if answer is None else sglang_compat.logprobs_of(answer)
        return engine_output(request, answer, logprobs, state, self._shapes)

    async def perform(self, request: TaskRequest) -> TaskOutput:
        """See the protocol."""
        run = self._current()
        if TASK_FEATURES[request.task] not in self.info.features:
            raise RequestRefused(f"task {request.task}: this engine was started for task={self.config.task!r}")
        try:
            work = scored if request.task == "score" else pooled
            output = await work(run.manager, request)
        except RequestRefused:
            raise
        except ValueError as error:
            run.check()
            raise RequestRefused(f"SGLang refused the request: {error}") from error
        except Exception as error:
            run.check()
            raise EngineError(f"SGLang failed on the request: {error}") from error
        run.check()
        return output

    def progress(self, request_id: str, start: int = 0) -> Progress | None:
        """See the protocol. SGLang reports what it has every 50 tokens, of a request that streams every step."""
        from . import compat as sglang_compat  # noqa: PLC0415

        if self._run is None or not self._run.ready:
            return None
        if (found := sglang_compat.generated_so_far(self._run.manager, request_id, start)) is None:
            return None
        if (request := self._asking.get(request_id)) is not None:
            return progress_of(request, found, start)
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
        return await run.race(prepare_weights(run.channel, order, tp_size=self.config.tp_size))

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        """See the protocol. A caller that is cancelled does not stop the transfer, which has its own deadline."""
        run, loader, tp_size = self._current(), self._weight_loader, self.config.tp_size
        return await run.race(commit_weights(run.manager, run.channel, order, loader=loader, tp_size=tp_size))

    async def send_weights(self, order: TransferOrder) -> TransferReport:
        """See the protocol. A caller that is cancelled does not stop it: the sender's store, or its deadline, does."""
        run = self._current()
        return await run.race(send_weights(run.channel, order, tp_size=self.config.tp_size))

    async def load_adapter(self, adapter: Adapter) -> None:
        """See the protocol. A caller that is cancelled does not stop it."""
        run = self._current()
        await run.race(sglang_lora.load(run.manager, adapter, model=self.config.model, tp_size=self.config.tp_size))

    async def unload_adapter(self, name: str, version: int) -> None:
        """See the protocol."""
        run = self._current()
        await run.race(sglang_lora.unload(run.manager, name, version))

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """See the protocol. A caller that is cancelled does not stop it."""
        run = self._current()
        return await run.race(sglang_ops.operate(run, self.info, operation, dict(params)))

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
