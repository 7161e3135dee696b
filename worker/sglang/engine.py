"""The engine protocol on real SGLang, inside the worker's process and on its event loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...messages.errors import EngineDead, EngineError, RequestRefused, RolloutMQError
from ...sync.transfer import TransferOrder, TransferReport
from ..engine import (
    NOTHING_MORE,
    POOLING_FEATURES,
    TASK_FEATURES,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    Generated,
    TaskOutput,
    TaskRequest,
)
from ..logit_processors import Registry
from . import lora, operations
from .calls import Shapes, check_request, engine_output, generated_so_far, grammar_refusal, progress_of
from .config import SGLangConfig, may_begin_empty
from .features import features
from .run import SGLangRun
from .weights import clear_head, commit_weights, prepare_weights
from .wire import COMMIT_LOADER

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ...sync.adapters import Adapter  # torch

__all__ = ["SGLangConfig", "SGLangEngine"]


class SGLangEngine:
    """SGLang behind :class:`~rolloutmq.worker.engine.protocol.Engine`; one may run in a process at a time.

    Log-probabilities are those of the model's own distribution, with logit bias and penalties but before temperature
    and truncation.
    """

    _weight_loader: ClassVar[str] = COMMIT_LOADER

    def __init__(self, config: SGLangConfig) -> None:
        self.config = config
        self._info: EngineInfo | None = None
        self._run: SGLangRun | None = None
        self._processors = Registry(config.logit_processors)
        self._shapes = Shapes()
        self._asking: dict[str, EngineRequest] = {}  # running requests that ask for more than tokens

    @property
    def info(self) -> EngineInfo:
        """See the protocol. Also valid after `close`."""
        if self._info is None:
            raise EngineError("the engine has not been started")
        return self._info

    async def start(self, *, empty: bool = False) -> None:
        """See the protocol. It takes seconds for a tiny model and minutes for a large one. Raises ConfigError too."""
        empty = empty and may_begin_empty(self.config)
        if self._run is not None:
            if self._run.alive:
                raise EngineError("the engine is already running")
            await self.close()
        self._processors.load_own()
        config = self.config.model_copy(update={"load_format": "dummy"}) if empty else self.config
        run = SGLangRun(config, self._weight_loader)
        info = await run.open()  # leaves nothing behind if it fails
        if empty and (lost := await operations.floating_buffers(run)):
            logger.warning("the checkpoint is read after all: no version has the buffers %s", ", ".join(lost[:3]))
            await run.close()
            empty, run = False, SGLangRun(self.config, self._weight_loader)
            info = await run.open()
        self._run = run
        try:
            random, able = self.config.load_format == "dummy", features(self.config, run.manager)
            self._info = replace(info, empty=empty, random=random, features=able)
            self._shapes = run.engine.shapes()
            if self.config.task == "reward":
                await clear_head(run.manager, self.config.model, self.config.tp_size)
        except BaseException as error:
            await self.close()  # without this no engine could be started in this process any more
            if isinstance(error, RolloutMQError) or not isinstance(error, Exception):
                raise
            raise EngineError(f"SGLang started {self.config.model!r}, which cannot be used: {error}") from error

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """See the protocol."""
        run = self._current()
        if self.info.features & POOLING_FEATURES:  # such a request would end the scheduler
            raise RequestRefused(f"generate: this engine was started for task={self.config.task!r}")
        seeded = self.config.deterministic
        check_request(request, self.info, self._shapes, self._processors, deterministic=seeded)
        if request.adapter and not self.info.adapters.has(request.adapter, request.adapter_version):
            raise EngineError(f"adapter {request.adapter}@{request.adapter_version} is not in this engine")
        from .calls.ask import generate  # noqa: PLC0415 – imports SGLang, which `start` has loaded

        if request.wanted is not NOTHING_MORE:
            self._asking[request.request_id] = request
        try:
            with _asked(run, request):
                answer = await generate(run.manager, request, deterministic=seeded)
        finally:
            self._asking.pop(request.request_id, None)
        return engine_output(request, answer, self._shapes)

    async def perform(self, request: TaskRequest) -> TaskOutput:
        """See the protocol."""
        run = self._current()
        if TASK_FEATURES[request.task] not in self.info.features:
            raise RequestRefused(f"task {request.task}: this engine was started for task={self.config.task!r}")
        from .calls.ask import perform  # noqa: PLC0415 – imports SGLang, which `start` has loaded

        with _asked(run, request):
            return await perform(run.manager, request)

    def progress(self, request_id: str, start: int = 0) -> Generated | None:
        """See the protocol. SGLang reports every 50 tokens, and every step of a request that streams."""
        if self._run is None or not self._run.ready:
            return None
        if (found := generated_so_far(self._run.manager, request_id, start)) is None:
            return None
        if (request := self._asking.get(request_id)) is not None:
            return progress_of(request, found, start)
        return Generated(np.array(found[0], dtype=np.int32), np.array(found[1], dtype=np.float32))

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

    async def load_adapter(self, adapter: Adapter) -> None:
        """See the protocol. A caller that is cancelled does not stop it."""
        run = self._current()
        await run.race(lora.load(run.manager, adapter, model=self.config.model, tp_size=self.config.tp_size))

    async def unload_adapter(self, name: str, version: int) -> None:
        """See the protocol."""
        run = self._current()
        await run.race(lora.unload(run.manager, name, version))

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """See the protocol. A caller that is cancelled does not stop it."""
        run = self._current()
        return await run.race(operations.operate(run, self.info, operation, dict(params)))

    async def healthy(self) -> bool:
        """See the protocol."""
        return self._run is not None and self._run.alive

    async def close(self) -> None:
        """See the protocol. Python's resource tracker stays: each process has one, and it is not SGLang's."""
        run, self._run = self._run, None
        if run is not None:
            await run.close()

    def _current(self) -> SGLangRun:
        if self._run is None:
            raise EngineDead("the engine is not running")
        return self._run


@contextmanager
def _asked(run: SGLangRun, request: EngineRequest | TaskRequest) -> Iterator[None]:
    """Raise SGLang's errors as those of the protocol, and EngineDead if the engine is gone when the block ends."""
    try:
        yield
    except RequestRefused:
        raise
    except ValueError as error:
        run.check()
        why = grammar_refusal(request, str(error)) if isinstance(request, EngineRequest) else str(error)
        raise RequestRefused(f"SGLang refused the request: {why}") from error
    except Exception as error:
        run.check()
        raise EngineError(f"SGLang failed on the request: {error}") from error
    run.check()
