"""What `switch` does with each kind of request, on a scheduler of the same outside as SGLang's and nothing inside."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.messages.errors import EngineError, WeightSyncError
from rolloutmq.worker.sglang.inside import scheduler as inside_scheduler
from rolloutmq.worker.sglang.inside.scheduler import current, install
from rolloutmq.worker.sglang.inside.switches import check, switch


def request(rid: str, key: str | None = "1", tokens: int = 0, lora: str | None = None, kv: Any = None) -> Any:
    """kv: None, or an object, in 0.5.17; in newer releases always an object, which knows."""
    key = (key or "") + lora if lora else key
    params = SimpleNamespace(custom_params=None)
    return SimpleNamespace(
        rid=rid, extra_key=key, lora_id=lora, output_ids=list(range(tokens)), kv=kv, sampling_params=params,
        finished=lambda: False, to_finish=None, update_finish_state=lambda: None,
    )  # fmt: skip


class Scheduler:
    def __init__(self, **arguments: Any) -> None:
        self.init_request_dispatcher()
        self.server_args = SimpleNamespace(pp_size=1, disaggregation_mode="null", **arguments)
        self.waiting_queue: list[Any] = []
        self.running_batch, self.last_batch, self.chunked_req = SimpleNamespace(reqs=[]), None, None
        self.idle_sleeper: Any = None
        self.draft_worker: Any = None
        self.weight_updater: Any = SimpleNamespace()

    def init_request_dispatcher(self) -> None:
        self._request_dispatcher = lambda request: request

    def run_event_loop(self) -> None:
        pass

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for request in recv_reqs:
            self._request_dispatcher(request)

    def is_fully_idle(self) -> bool:
        return not self.waiting_queue and not self.running_batch.reqs

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self.waiting_queue.append(req)

    def process_batch_result(self, batch: Any, result: int) -> None:
        for req in batch.reqs:
            req.output_ids += [0] * result


MODULE: Any = SimpleNamespace()
"""Stands for SGLang's module."""


def make(**arguments: Any) -> Any:
    MODULE.Scheduler = Scheduler
    install()
    return MODULE.Scheduler(**arguments)


@pytest.fixture(autouse=True)
def none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside_scheduler, "_scheduler", None)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", MODULE)


def test_the_scheduler_of_this_process() -> None:
    with pytest.raises(EngineError, match="no SGLang scheduler"):
        current()
    scheduler = make()
    assert current() is scheduler


def test_a_scheduler_that_looks_different_is_refused_by_what_it_lacks() -> None:
    MODULE.Scheduler = type("Scheduler", (Scheduler,), {"run_event_loop": None})
    with pytest.raises(EngineError, match=r"managers\.scheduler\.Scheduler has no run_event_loop; expected is one"):
        install()
    del MODULE.Scheduler
    with pytest.raises(EngineError, match=r"managers\.scheduler\.Scheduler is not there .* process_batch_result"):
        install()

    class Bare(Scheduler):
        def __init__(self) -> None:
            super().__init__()
            del self.chunked_req

    MODULE.Scheduler = Bare
    install()
    with pytest.raises(EngineError, match="chunked_req"):
        MODULE.Scheduler()


def test_counts_of_every_request_at_once_when_no_result_is_out() -> None:
    scheduler = make()
    running, merging, chunked, waiting = request("a", tokens=5), request("b", tokens=1), request("c"), request("d")
    scheduler.running_batch.reqs = [running]
    scheduler.last_batch = SimpleNamespace(reqs=[merging, running])
    scheduler.chunked_req = chunked
    scheduler._add_request_to_queue(waiting)
    told: list[dict[str, int]] = []
    switch(scheduler, "2", lambda counts, anew: told.append(counts))
    assert told == [{"a": 5, "b": 1, "c": 0, "d": 0}]
    scheduler.process_batch_result(SimpleNamespace(reqs=[running]), 1)
    assert len(told) == 1


def test_of_whom_there_is_no_cache() -> None:
    kv, gone = SimpleNamespace(holds_kv=True), SimpleNamespace(holds_kv=False)
    scheduler = make()
    running, retracted, fresh = request("a", tokens=5, kv=kv), request("b", tokens=3, kv=gone), request("c")
    first, chunked = request("e", kv=kv), request("f", kv=kv)
    scheduler.running_batch.reqs = [running]
    scheduler._add_request_to_queue(retracted)
    scheduler._add_request_to_queue(fresh)
    scheduler.chunked_req = chunked
    scheduler.result_queue = [(SimpleNamespace(reqs=[first]), 1)]  # the old weights have sampled its first token
    told: list[str] = []
    switch(scheduler, "2", lambda counts, anew: told.extend(anew))
    scheduler.process_batch_result(*scheduler.result_queue.pop(0))
    assert sorted(told) == ["b", "c"]


def test_who_waits_for_a_grammar_is_counted_and_gets_the_new_key() -> None:
    scheduler = make()
    scheduler._add_request_to_queue(request("a", tokens=2))
    compiling = request("b")
    scheduler.grammar_manager = SimpleNamespace(grammar_queue=[compiling])
    told: list[dict[str, int]] = []
    switch(scheduler, "2", lambda counts, anew: told.append(counts))
    assert told == [{"a": 2, "b": 0}]
    scheduler._add_request_to_queue(compiling)
    assert compiling.extra_key == "2"


def test_counts_include_the_results_that_are_out_and_nothing_after() -> None:
    scheduler = make()
    running = [request("a", tokens=5), request("b", tokens=7)]
    batches = [SimpleNamespace(reqs=running), SimpleNamespace(reqs=running[:1])]
    scheduler.result_queue = [(batch, 1) for batch in batches]
    scheduler.last_batch = batches[-1]  # b is only in the older one
    first: list[dict[str, int]] = []
    second: list[dict[str, int]] = []
    switch(scheduler, "2", lambda counts, anew: first.append(counts))
    scheduler.process_batch_result(*scheduler.result_queue.pop(0))
    assert first == []
    scheduler.result_queue.append((SimpleNamespace(reqs=running), 1))  # launched under version 2
    switch(
        scheduler, "3", lambda counts, anew: second.append(counts)
    )  # a second switch before the first one's results are all in
    scheduler.process_batch_result(*scheduler.result_queue.pop(0))
    assert (first, second) == ([{"a": 7, "b": 8}], [])
    scheduler.process_batch_result(*scheduler.result_queue.pop(0))
    assert (first, second) == ([{"a": 7, "b": 8}], [{"a": 8, "b": 9}])


def test_only_who_holds_kv_keeps_an_older_key() -> None:
    scheduler = make()
    fresh, session, adapter, keyless = (
        request("a"),
        request("b", kv=SimpleNamespace(holds_kv=True)),
        request("c", lora="adapter"),
        request("d", key=None),
    )
    released, old_style = request("e", kv=SimpleNamespace(holds_kv=False)), request("f", kv=object())
    running = request("g", tokens=4, kv=object())
    for one in (running, fresh, session, adapter, keyless, released, old_style):
        scheduler._add_request_to_queue(one)
    scheduler.waiting_queue.remove(running)
    scheduler.running_batch.reqs = [running]
    switch(scheduler, "2", lambda counts, anew: None)
    keys = [one.extra_key for one in (running, fresh, session, adapter, keyless, released, old_style)]
    assert keys == ["1", "2", "1", "2adapter", "2", "2", "1"]

    running.kv = None  # retracted: prefilled again, under the new weights, whatever its tokens are
    scheduler._add_request_to_queue(running, is_retracted=True)
    late, new = request("h"), request("i", key="2")
    scheduler._add_request_to_queue(late)
    scheduler._add_request_to_queue(new)
    assert [one.extra_key for one in (running, late, new)] == ["2", "2", "2"]
    assert len(running.output_ids) == 4

    later = request("j", key="3")  # another mode brought version 3
    scheduler._add_request_to_queue(later)
    assert later.extra_key == "3"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp_size", 2),
        ("dp_size", 2),
        ("disaggregation_mode", "decode"),
        ("speculative_algorithm", "EAGLE"),
        ("enable_hierarchical_cache", True),
    ],
)
def test_a_configuration_that_switch_does_not_know_is_refused_by_name(name: str, value: Any) -> None:
    scheduler = make()
    check(scheduler, "2")
    setattr(scheduler.server_args, name, value)
    with pytest.raises(WeightSyncError, match=f"{name}={value!r}"):
        check(scheduler, "2")


def test_a_key_that_requests_have_had_is_refused() -> None:
    scheduler = make()
    scheduler._add_request_to_queue(request("a", key="1"))
    scheduler.waiting_queue.clear()
    switch(scheduler, "2", lambda counts, anew: None)
    for key in ("1", "2"):
        with pytest.raises(WeightSyncError, match=f"as version {key} before"):
            check(scheduler, key)
    check(scheduler, "3")
