"""Inside SGLang's scheduler process: new weights while requests run, and which of their tokens the old ones sampled.

SGLang's scheduler takes in requests, weight updates among them, between two batches. With overlap scheduling the newest
batch has then been launched but its tokens are not known to the requests yet: they are in `result_queue`, and are
handed out after the next batch, the first under new weights, was launched. So the number of a request's older tokens is
known for certain only when everything that was in that queue has been processed.

What SGLang keeps of a request decides under which key its prefixes are cached (`extra_key`; this package puts the
weights version there). Seen in 0.5.17 and 0.5.23:

- a request that holds KV (running, or in the middle of a chunked prefill) shares nodes of the prefix tree under its
  key: it keeps the key, so that what it adds to the tree can never be found by a request of a newer version;
- a request that waits holds none. What was matched for it before (`calc_priority`) is matched anew, under the key it
  then has, before it runs (`init_next_round_input`);
- a request that was retracted has lost its KV and is prefilled like a new one; its KV is then all of the new weights.
  With its old key it could find prefixes of the old ones again, so it gets the new key as well. Its tokens stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ....messages.errors import EngineError, WeightSyncError
from ...garbage import settle
from .. import streaming as sglang_streaming
from ..loader import loader_request
from .errands import Errands
from .grammar import Grammars
from .stops import watch
from .tokenizer import EngineTokenizer

logger = logging.getLogger(__name__)
HOOKS = (
    "process_batch_result",
    "_add_request_to_queue",
    "init_request_dispatcher",
    "run_event_loop",
    "is_fully_idle",
    "process_input_requests",
)
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
ELSEWHERE = {
    "pp_size": (None, 1),
    "dp_size": (None, 1),
    "disaggregation_mode": (None, "null"),
    "enable_pdmux": (None, False),
    "speculative_algorithm": (None,),
    "dllm_algorithm": (None,),
    "enable_hisparse": (None, False),
    "enable_hierarchical_cache": (None, False),
    "enable_lmcache": (None, False),
    "enable_flexkv": (None, False),
    "enable_unified_cache_external_linker": (None, False),
}
"""Server arguments that keep requests, results or prefixes in more places than this module looks at."""
OnCounts = Callable[[dict[str, int]], None]


@dataclass(slots=True)
class _Report:
    """What is to be told about one switch once `left` more batches have been processed."""

    left: int
    requests: list[Any]
    tell: OnCounts

    def send(self) -> None:
        self.tell({request.rid: len(request.output_ids) for request in self.requests})


@dataclass(slots=True)
class Switches:
    """One scheduler's switches so far.

    key: what fresh requests of older keys get instead, None before the first switch. retired: those keys. seen: keys
    that came since the last switch.
    """

    key: str | None = None
    retired: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    reports: list[_Report] = field(default_factory=list)

    def admit(self, request: Any) -> None:
        """A request that is about to wait, new or retracted: never under a key of older weights."""
        adapter = request.lora_id or ""  # SGLang appends it to the key
        key = (request.extra_key or "").removesuffix(adapter)
        if self.key is not None and key in self.retired and not _holds_kv(request):
            key, request.extra_key = self.key, self.key + adapter
        self.seen.add(key)

    def processed(self) -> None:
        """The results of one more batch have been handed out."""
        for report in self.reports:
            report.left -= 1
        while self.reports and self.reports[0].left <= 0:
            self.reports.pop(0).send()


BUSY = "a request came first"
_scheduler: Any = None


def current() -> Any:
    """The scheduler of this process. Raises EngineError if this is no scheduler process, or it has not got so far."""
    if _scheduler is None:
        raise EngineError("no SGLang scheduler runs in this process")
    return _scheduler


def install(module: Any, tokenizer: str = "") -> None:
    """Have `run_scheduler_process` of SGLang's scheduler module start a scheduler that `switch` works on.

    tokenizer: where the engine's is, "" for none. It also watches for stops, and has grammars if there is a tokenizer.
    Raises EngineError if the scheduler class is not as in the releases this was written for.
    """
    base = getattr(module, "Scheduler", None)
    missing = [name for name in HOOKS if not callable(getattr(base, name, None))]
    if missing:
        raise EngineError(f"SGLang's scheduler has no {', '.join(missing)}: this release is not supported")
    module.Scheduler = _switchable(base, tokenizer)


def _switchable(base: Any, tokenizer: str) -> Any:
    class SwitchableScheduler(base):  # type: ignore[misc]
        """SGLang's scheduler, reachable from its own process, with :class:`Switches`."""

        rolloutmq_switches: Switches
        rolloutmq_errands: Errands
        rolloutmq_tokenizer: EngineTokenizer | None = None
        rolloutmq_grammars: Grammars | None = None
        _request_dispatcher: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            global _scheduler  # noqa: PLW0603  (SGLang's loader hook is given the model, and nothing else)
            self.rolloutmq_switches = Switches()
            self.rolloutmq_errands = Errands()
            if tokenizer:  # loaded while the model is
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
            _scheduler = self

        def init_request_dispatcher(self) -> None:
            super().init_request_dispatcher()
            dispatch = self._request_dispatcher
            self._request_dispatcher = lambda request: _dispatch(self, dispatch, request)

        def run_event_loop(self) -> None:
            # On a CPU SGLang's "empty the device's cache" is a full collection, too, after every update and when idle.
            settle()
            super().run_event_loop()

        def process_input_requests(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().process_input_requests(*args, **kwargs)
            self.rolloutmq_errands.run()
            return answer

        def _add_request_to_queue(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            self.rolloutmq_switches.admit(req)
            watch(req, self.rolloutmq_tokenizer)
            sglang_streaming.watch(req)
            if self.rolloutmq_grammars is not None:
                self.rolloutmq_grammars.catch_up(req)
            return super()._add_request_to_queue(req, *args, **kwargs)

        def process_batch_result(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().process_batch_result(*args, **kwargs)
            if self.rolloutmq_switches.reports:
                self.rolloutmq_switches.processed()
            return answer

    return SwitchableScheduler


def _trusts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether SGLang's server arguments, the scheduler's first, allow a model's own code."""
    arguments = args[0] if args else kwargs.get("server_args")
    return bool(getattr(arguments, "trust_remote_code", False))


def _dispatch(scheduler: Any, dispatch: Callable[[Any], Any], request: Any) -> Any:
    """Newer releases want weights between a begin and an end, each a request of its own: a batch could run in between.

    Weights that come outside of such a session get one around them here, in one go.
    """
    updater: Any = getattr(scheduler, "weight_updater", None)
    alone = getattr(updater, "_session", True) is None  # older releases have no sessions
    if type(request).__name__ != "UpdateWeightsFromTensorReqInput" or not alone:
        return dispatch(request)
    from sglang.srt.managers import io_struct  # noqa: PLC0415  (only in a scheduler process)

    began = updater.begin_weight_update(io_struct.BeginWeightUpdateReqInput())
    if not began.success:
        return io_struct.UpdateWeightsFromTensorReqOutput(success=False, message=began.message)
    answer = dispatch(request)
    ended = updater.end_weight_update(io_struct.EndWeightUpdateReqInput())
    if answer.success and not ended.success:
        return io_struct.UpdateWeightsFromTensorReqOutput(success=False, message=ended.message)
    return answer


def idle() -> bool:
    """Whether every batch has been processed: the GPU is done with them then. On the scheduler's main thread."""
    return _scheduler is not None and bool(_scheduler.is_fully_idle())


def set_off(loader: str, text: str, over: Callable[[str], object]) -> None:
    """Have SGLang call `loader(model, [(text, tensor)])` between two batches; then `over` with why it refused, or "".

    With BUSY if it is not idle: what runs must be told of the update in the order in which it came.

    From another thread; see sglang_errands for when this must not be used. Raises EngineError if there is no scheduler.
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
    """Why SGLang did not, or "". What it does around a call is a millisecond: left out where it does nothing."""
    if hasattr(scheduler.weight_updater, "begin_weight_update") or scheduler.draft_worker is not None:
        answer = scheduler._request_dispatcher(loader_request(loader, text, 1))
        return "" if answer.success else str(answer.message)
    updater = scheduler.tp_worker.model_runner.weight_updater
    done, message = updater.update_weights_from_tensor([(text, torch.tensor([0]))], load_format=loader)
    return "" if done else str(message)


def check(scheduler: Any, new_key: str) -> None:
    """Whether `switch` to `new_key` would work; ask before anything is written.

    Raises WeightSyncError: SGLang was configured in a way that keeps requests or prefixes where `switch` does not look,
    it is paused, or `new_key` is one that prefixes of other weights may be cached under.
    """
    arguments = scheduler.server_args
    for name, values in ELSEWHERE.items():
        if (value := getattr(arguments, name, None)) not in values:
            raise WeightSyncError(f"weights cannot be updated in place with {name}={value!r}")
    if getattr(scheduler, "_engine_paused", False):
        raise WeightSyncError("weights cannot be updated in place while SGLang is paused")
    switches: Switches = scheduler.rolloutmq_switches
    if new_key in switches.retired | switches.seen:
        raise WeightSyncError(f"weights cannot be updated in place: requests have run as version {new_key} before")


def switch(scheduler: Any, new_key: str, on_counts: OnCounts) -> None:
    """The weights have just been replaced: keep requests and prefixes of the old and the new ones apart.

    Call it from the weight loader, on the scheduler's main thread, on every tensor-parallel rank, when the last weight
    is written (and only then: after a failure the old weights' keys must stay). Before its first write the loader has
    to wait for the device: with overlap scheduling the newest batch may still be running.

    on_counts({request id: tokens}): how many output tokens the old weights sampled, for every request that has not
    ended before; called once, on the main thread, in this call or (with overlap scheduling) one batch later. It must
    not raise and should not block. A request may have ended meanwhile with fewer tokens than it is told here.
    """
    switches: Switches = scheduler.rolloutmq_switches
    switches.retired |= switches.seen - {new_key}
    switches.key, switches.seen = new_key, {new_key}
    for request in scheduler.waiting_queue:
        switches.admit(request)
    pending = len(getattr(scheduler, "result_queue", ()))
    report = _Report(pending, list({request.rid: request for request in _live(scheduler)}.values()), on_counts)
    if pending:
        switches.reports.append(report)
    else:
        report.send()


def _live(scheduler: Any) -> Iterator[Any]:
    """Every request that may have tokens of the old weights, some of them more than once."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    batches += [batch for batch, *_ in getattr(scheduler, "result_queue", ())]
    for batch in batches:
        if batch is not None:
            yield from batch.reqs
    yield from scheduler.waiting_queue
    yield from getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def _holds_kv(request: Any) -> bool:
    # 0.5.17: None unless there is some; later an object that knows.
    return request.kv is not None and bool(getattr(request.kv, "holds_kv", True))
