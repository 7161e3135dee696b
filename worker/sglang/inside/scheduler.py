"""SGLang's scheduler with this package's additions, and access to it from its own process.

It does work between two batches (:class:`Errands`), counts tokens when weights change (:mod:`.switches`), and hands new
requests to stops, grammars and streams.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ....messages.errors import EngineError
from ...garbage import settle
from .. import patches
from ..wire import STREAM, extras_of, loader_request, sglang_request
from .grammar import Grammars
from .stops import watch
from .switches import Switches
from .tokenizer import EngineTokenizer

logger = logging.getLogger(__name__)
FIELDS = (
    "waiting_queue",
    "running_batch",
    "last_batch",
    "chunked_req",
    "server_args",
    "idle_sleeper",
    "weight_updater",
    "draft_worker",
)
"""Attributes that a scheduler must have once it is made. `patches` has the methods."""
BUSY = "a request came first"
"""Why `set_off` did not call the loader."""
POLLIN = 1
"""zmq.POLLIN; zmq is SGLang's dependency, not this package's."""
_scheduler: Any = None


class Errands:
    """Work for the thread that runs the model, between two batches: `put` from any thread, `run` on the scheduler's.

    A request of SGLang's takes 2 to 3 ms from the worker to that thread and back. The transfer of a small model takes
    no longer. An errand wakes a scheduler that sleeps. It keeps no order with SGLang's own requests, so none may be
    under way. It does not reach all ranks of an engine in the same step.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._rung = False
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def wake(self, sleeper: Any) -> None:
        """Let an errand end the sleep of SGLang's idle sleeper. sleeper: None if there is none."""
        if sleeper is not None:
            sleeper.poller.register(self._near.fileno(), POLLIN)

    def put(self, job: Callable[[], None]) -> None:
        """Queue `job`, which must not raise."""
        self._jobs.put(job)
        with contextlib.suppress(BlockingIOError):  # full: the scheduler is awake, or about to be
            self._far.send(b"1")
        # The flag comes last. If it came first, `run` could miss the byte, which would keep the scheduler awake.
        self._rung = True

    def run(self) -> None:
        """Do what was put. It costs next to nothing if there is nothing."""
        if not self._rung:
            return
        self._rung = False
        with contextlib.suppress(BlockingIOError):
            while self._near.recv(4096):
                pass
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            job()


def current() -> Any:
    """Return the scheduler of this process. Raises EngineError if there is none, or not yet."""
    if _scheduler is None:
        raise EngineError("no SGLang scheduler runs in this process")
    return _scheduler


def install(tokenizer: str = "") -> None:
    """Let SGLang make this scheduler in this process. tokenizer: path of the engine's, "" for none.

    It has grammars if there is a tokenizer. Raises EngineError if SGLang's scheduler is not as expected.
    """
    base: Any = patches.original("managers.scheduler:Scheduler")

    class OwnScheduler(base):  # type: ignore[misc]
        """SGLang's scheduler, reachable from its own process, with errands and switches."""

        rolloutmq_switches: Switches
        rolloutmq_errands: Errands
        rolloutmq_prompts_only: bool
        rolloutmq_tokenizer: EngineTokenizer | None = None
        rolloutmq_grammars: Grammars | None = None
        _request_dispatcher: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            global _scheduler  # noqa: PLW0603 – SGLang hands its loader hook the model, and nothing else
            self.rolloutmq_switches = Switches()
            self.rolloutmq_errands = Errands()
            if tokenizer:  # it loads while the model loads
                self.rolloutmq_tokenizer = EngineTokenizer(tokenizer, trust_remote_code=_trusts(args, kwargs))
            super().__init__(*args, **kwargs)
            missing = [name for name in FIELDS if not hasattr(self, name)]
            if missing:
                raise EngineError(f"SGLang's scheduler has no {', '.join(missing)}: this release is not supported")
            if self.rolloutmq_tokenizer is not None:
                self.rolloutmq_tokenizer.get()
                self.rolloutmq_grammars = Grammars(self, self.rolloutmq_tokenizer)
                self.rolloutmq_grammars.make()
            self.rolloutmq_errands.wake(self.idle_sleeper)
            self.rolloutmq_prompts_only = _caches_prompts_only(self.server_args)
            _scheduler = self

        def init_request_dispatcher(self) -> None:
            super().init_request_dispatcher()
            dispatch = self._request_dispatcher
            self._request_dispatcher = lambda request: _dispatch(self, dispatch, request)

        def run_event_loop(self) -> None:
            # On a CPU SGLang's "empty the device's cache" includes a full collection, after every update and when idle.
            settle()
            super().run_event_loop()

        def process_input_requests(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().process_input_requests(*args, **kwargs)
            self.rolloutmq_errands.run()
            return answer

        def _add_request_to_queue(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            self.rolloutmq_switches.admit(req)
            watch(req, self.rolloutmq_tokenizer)
            if STREAM in extras_of(req):
                req.stream = True  # every step of it is reported
            if self.rolloutmq_grammars is not None:
                self.rolloutmq_grammars.catch_up(req)
            return super()._add_request_to_queue(req, *args, **kwargs)

        def process_batch_result(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self.rolloutmq_prompts_only and batch.forward_mode.is_decode():
                for request in batch.reqs:
                    request.skip_radix_cache_insert = True  # of what it generates: its prompt is in the cache by now
            answer = super().process_batch_result(batch, *args, **kwargs)
            if self.rolloutmq_switches.reports:
                self.rolloutmq_switches.processed()
            return answer

    patches.replace("managers.scheduler:Scheduler", OwnScheduler)


def _caches_prompts_only(server_args: Any) -> bool:
    """Whether the prefix cache is to have no generated tokens.

    A GPU's prefill and decode kernels round differently. So what follows a generated token would depend on whether its
    KV came from the cache or was computed anew, and a deterministic engine could not repeat it. Those of a CPU agree.
    """
    return bool(getattr(server_args, "enable_deterministic_inference", False)) and server_args.device != "cpu"


def _trusts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether SGLang's server arguments, the scheduler's first, allow a model's own code."""
    arguments = args[0] if args else kwargs.get("server_args")
    return bool(getattr(arguments, "trust_remote_code", False))


def _dispatch(scheduler: Any, dispatch: Callable[[Any], Any], request: Any) -> Any:
    """Open and close a weight-update session around weights that come outside of one.

    Newer releases need a begin and an end around weights. As requests of their own these would let a batch run between
    them.
    """
    updater: Any = getattr(scheduler, "weight_updater", None)
    alone = getattr(updater, "_session", True) is None  # older releases have no sessions
    if type(request).__name__ != "UpdateWeightsFromTensorReqInput" or not alone:
        return dispatch(request)
    began = updater.begin_weight_update(sglang_request("BeginWeightUpdateReqInput"))
    if not began.success:
        return sglang_request("UpdateWeightsFromTensorReqOutput", success=False, message=began.message)
    answer = dispatch(request)
    ended = updater.end_weight_update(sglang_request("EndWeightUpdateReqInput"))
    if answer.success and not ended.success:
        return sglang_request("UpdateWeightsFromTensorReqOutput", success=False, message=ended.message)
    return answer


def idle() -> bool:
    """Whether every batch has been processed, so that the GPU is done with all.

    Call it on the scheduler's main thread.
    """
    return _scheduler is not None and bool(_scheduler.is_fully_idle())


def set_off(loader: str, text: str, over: Callable[[str], object]) -> None:
    """Let SGLang call `loader(model, [(text, tensor)])` between two batches, then call `over` with its refusal or "".

    The reason is BUSY if the scheduler is not idle, because requests and updates must keep their order. Call it from
    another thread. :class:`Errands` says when it must not be used. Raises EngineError if there is no scheduler.
    """
    scheduler = current()

    def errand() -> None:
        try:
            why = _call_loader(scheduler, loader, text) if scheduler.is_fully_idle() else BUSY
        except Exception as error:  # it would end the scheduler
            logger.exception("SGLang failed to call %s", loader)
            why = f"{type(error).__name__}: {error}"
        over(why)

    scheduler.rolloutmq_errands.put(errand)


def _call_loader(scheduler: Any, loader: str, text: str) -> str:
    """Call the loader. Returns why SGLang refused, or "".

    SGLang's work around it takes 1 ms and is left out if needless.
    """
    if hasattr(scheduler.weight_updater, "begin_weight_update") or scheduler.draft_worker is not None:
        answer = scheduler._request_dispatcher(loader_request(loader, text, 1))
        return "" if answer.success else str(answer.message)
    updater = scheduler.tp_worker.model_runner.weight_updater
    done, message = updater.update_weights_from_tensor([(text, torch.tensor([0]))], load_format=loader)
    return "" if done else str(message)
