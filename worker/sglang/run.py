"""One life of an SGLang engine, from its launch to the end of its last process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from ...messages.errors import EngineDead, EngineError, RolloutMQError
from ...messages.model import NCCL_AGREED
from ..cpu_support import gpu_found, share_cores
from ..engine import EngineInfo
from .channel import Channel
from .config import SGLangConfig, server_arguments
from .features import engine_tokenizer
from .inside import ChildSetup, restore_environment
from .processes import EngineProcesses

if TYPE_CHECKING:
    from .launch import Launched  # imports SGLang

logger = logging.getLogger(__name__)
WATCH_INTERVAL_S = 0.2
T = TypeVar("T")


class SGLangRun:
    """SGLang's processes and its part of this process, for one :meth:`open` and one :meth:`close`.

    At most one is open in a process, because SGLang keeps its configuration in globals. SGLang's processes send SIGQUIT
    when one of them fails. SGLang would then end the whole program. While a run is open, SIGQUIT makes it lost instead.
    No other signal is touched.

    lost: why the engine is gone, or None.
    channel: to its scheduler processes. Only this user can enter its folder.
    """

    _open: ClassVar[SGLangRun | None] = None

    def __init__(self, config: SGLangConfig, weight_loader: str) -> None:
        self.config = config
        self.weight_loader = weight_loader
        self.lost: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="rolloutmq-", ignore_cleanup_errors=True)
        self.channel = Channel(self._folder.name)
        self._loop = asyncio.get_running_loop()
        self._lost_event = asyncio.Event()
        self._processes = EngineProcesses()
        self._engine: Launched | None = None
        self._launch: asyncio.Future[Launched] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._sigquit: Any = None

    @property
    def engine(self) -> Launched:
        """The running engine. Raises EngineDead if its processes are gone, or not there yet."""
        self.check()
        if self._engine is None:
            raise EngineDead("the SGLang engine is still starting")
        return self._engine

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager. Raises EngineDead as `engine` does."""
        return self.engine.manager

    def check(self) -> None:
        """Raise EngineDead if the processes are gone."""
        if self.lost is not None:
            raise EngineDead(f"the SGLang engine is gone: {self.lost}")

    @property
    def ready(self) -> bool:
        """Whether requests can be sent, as far as known without looking at the processes."""
        return self._engine is not None and self.lost is None

    @property
    def alive(self) -> bool:
        """Look whether every process of the engine runs."""
        return self._engine is not None and self.lost is None and self._processes.ended() is None

    async def open(self) -> EngineInfo:
        """Launch SGLang and load the model.

        Raises EngineError, or ConfigError for an `extra` argument that SGLang does not have. Nothing is left behind
        then.
        """
        if SGLangRun._open is not None:
            raise EngineError("an SGLang engine is already running in this process; one per process is the limit")
        SGLangRun._open = self
        self._take_sigquit()
        try:
            self._launch = asyncio.wrap_future(self._processes.launch(self._launch_blocking))
            self._engine = await asyncio.shield(self._launch)
            self._watch = asyncio.create_task(self._watch_processes())
            return self._engine.describe(self.config)
        except BaseException as error:
            await self.close()
            if isinstance(error, RolloutMQError) or not isinstance(error, Exception):
                raise
            raise EngineError(f"SGLang could not start {self.config.model!r}: {error}") from error

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises EngineDead, and cancels `work`, as soon as the engine is lost.

        If the caller is cancelled, `work` still continues to its end, because it must not be left half done.
        """
        task = asyncio.create_task(work)
        lost = asyncio.create_task(self._lost_event.wait())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and isinstance(task.exception(), EngineError):
                await asyncio.wait({lost}, timeout=3 * WATCH_INTERVAL_S)  # a dying process hangs up before it is missed
        finally:
            lost.cancel()
        if self.lost is not None:
            task.cancel()
            await asyncio.wait({task})
        self.check()
        return task.result()

    async def close(self) -> None:
        """End every process of this run, and give back what it holds here. Pending requests raise EngineDead."""
        self._lose("it was closed", expected=True)
        self.channel.close()
        if self._watch is not None:
            self._watch.cancel()
        while self._launch is not None and not self._launch.done():
            # The launching thread cannot be stopped. Without its processes it soon fails by itself.
            await self._loop.run_in_executor(None, self._processes.kill)
            await asyncio.wait({self._launch}, timeout=WATCH_INTERVAL_S)
        await self._loop.run_in_executor(None, self._processes.close)
        if self._launch is not None and not self._launch.cancelled() and self._launch.exception() is None:
            self._launch.result().release()
        self._give_sigquit_back()
        await self._loop.run_in_executor(None, self._folder.cleanup)
        if SGLangRun._open is self:
            SGLangRun._open = None

    def _launch_blocking(self) -> Launched:
        device: Literal["cpu", "cuda"] = "cuda" if gpu_found() else "cpu"
        if self.config.device not in ("auto", device):
            raise EngineError(f"device={self.config.device!r}: torch finds only {device!r} here")
        logger.info("importing SGLang")
        from . import launch as sglang  # noqa: PLC0415 – seconds of imports, wanted only where an engine runs

        sglang.check_names(self.config.extra)
        setup = ChildSetup(
            cpu=device == "cpu",
            threads=(self.config.cpu_threads or 1) if device == "cpu" else None,
            quiet=self.config.log_level in ("error", "critical"),
            control=self.channel.folder,
            model=self.config.model,
            # Ranks that decide by themselves may decide differently, and would wait for one another.
            staging="off" if self.config.tp_size > 1 and self.config.staging == "auto" else self.config.staging,
            environment={name: os.environ.get(name) for name in NCCL_AGREED},
            logit_processors=self.config.logit_processors,
            deterministic=self.config.deterministic,
            routed_experts=self.config.routed_experts,
            tokenizer=engine_tokenizer(self.config),
            inside={"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"} if self.config.memory_saver != "off" else {},
        )
        if device == "cpu" and self.config.tp_size > 1:
            share_cores(self.config.tp_size)
        arguments = server_arguments(self.config, device, self.weight_loader)
        self.check()  # it may be closed by now, which nothing else would heed before the model is loaded
        logger.info("starting SGLang on %s: its processes import it, too, and load the model", device)
        try:
            engine = sglang.launch(arguments, setup, self._lose)
        finally:
            restore_environment(setup.environment)
        self._processes.remember()
        return engine

    async def _watch_processes(self) -> None:
        # Polled, because that sees a process that is gone whatever else holds its pipes open.
        while (reason := self._processes.ended()) is None:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_INTERVAL_S)
        self._lose(reason)

    def _lose(self, reason: str, *, expected: bool = False) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._lost_event.set()
        if not expected:
            logger.error("the SGLang engine is gone: %s", reason)
        if self._engine is not None:
            self._engine.fail_pending()

    def _take_sigquit(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("the engine runs outside the main thread: a failing SGLang process ends this whole process")
            return
        self._sigquit = signal.getsignal(signal.SIGQUIT)
        self._loop.add_signal_handler(signal.SIGQUIT, self._lose, "one of its processes reported a failure")

    def _give_sigquit_back(self) -> None:
        if self._sigquit is not None:
            self._loop.remove_signal_handler(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, self._sigquit)
            self._sigquit = None
