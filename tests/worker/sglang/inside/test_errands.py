"""Work for the scheduler's thread that does not come by SGLang's way."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pools.pool import eventually
from test_switches import make, none_before  # noqa: F401 – a fixture

from rolloutmq.messages.errors import EngineError
from rolloutmq.sync.receive import Receiver
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.worker.sglang.channel import Channel
from rolloutmq.worker.sglang.inside import scheduler as inside_scheduler
from rolloutmq.worker.sglang.inside.control import LONGEST_ERROR, ControlServer
from rolloutmq.worker.sglang.inside.scheduler import Errands
from rolloutmq.worker.sglang.wire import socket_path


class Sleeper:
    """As SGLang's: sleeps until one of its sockets has something."""

    def __init__(self) -> None:
        self.poller = self
        self._poll = select.poll()

    def register(self, number: int, flags: int) -> None:
        assert flags == select.POLLIN
        self._poll.register(number, flags)

    def sleep(self, seconds: float) -> bool:
        """Whether something came."""
        return bool(self._poll.poll(seconds * 1e3))


def test_an_errand_wakes_a_sleeper_and_is_done_once() -> None:
    errands, sleeper, done = Errands(), Sleeper(), []
    errands.wake(sleeper)
    errands.run()
    assert not sleeper.sleep(0)
    threading.Timer(0.05, lambda: errands.put(lambda: done.append(threading.current_thread()))).start()
    while not done:  # it may be awake a moment before it sees why
        assert sleeper.sleep(20)
        errands.run()
    assert done == [threading.current_thread()]
    assert not sleeper.sleep(0)
    errands.run()
    assert len(done) == 1


def test_many_errands_are_done_in_order_though_nobody_reads_for_a_while() -> None:
    errands, sleeper, done = Errands(), Sleeper(), []
    errands.wake(sleeper)
    for number in range(100_000):  # more than the socket holds
        errands.put(lambda number=number: done.append(number))
    errands.run()
    assert done == list(range(100_000))
    assert not sleeper.sleep(0)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns fifty times as often as Python lets them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(usual)


def test_a_scheduler_that_was_awake_sleeps_again(eager_threads: None) -> None:
    """It sees the errand before it is told of it: a byte that nobody reads would keep it awake for ever."""
    errands, sleeper, done = Errands(), Sleeper(), []
    errands.wake(sleeper)
    for number in range(2000):
        putting = threading.Thread(target=errands.put, args=(lambda number=number: done.append(number),))
        putting.start()
        while len(done) <= number:
            errands.run()
        putting.join()
        errands.run()
        assert not sleeper.sleep(0)


def test_an_errand_that_is_put_by_an_errand_is_done() -> None:
    errands, done = Errands(), []
    errands.put(lambda: errands.put(lambda: done.append(1)))
    errands.run()
    assert done == [1]


def test_without_a_sleeper_there_is_nobody_to_wake() -> None:
    Errands().wake(None)


# --- what it is for: a loader that SGLang calls ----------------------------------------------------------------------


class Updater:
    """SGLang's, in a runner."""

    def __init__(self, answer: Any = (True, "Success")) -> None:
        self.called: list[tuple[str, int, str]] = []
        self._answer = answer

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str) -> Any:
        ((name, tensor),) = named_tensors
        self.called.append((name, int(tensor), load_format))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture
def scheduler() -> Any:
    return make()


def set_off(scheduler: Any, updater: Updater) -> list[str]:
    """What was told when it was over, after one turn of the scheduler's loop."""
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(weight_updater=updater))
    told: list[str] = []
    inside_scheduler.set_off("loader", "text", told.append)
    assert updater.called == told == []
    scheduler.process_input_requests([])
    return told


def test_an_older_release_has_its_runner_called(scheduler: Any) -> None:
    updater = Updater()
    assert set_off(scheduler, updater) == [""]
    assert updater.called == [("text", 0, "loader")]


@pytest.mark.parametrize(
    ("answer", "why"), [((False, "derived weights"), "derived weights"), (KeyError("x"), "KeyError: 'x'")]
)
def test_what_sglang_refuses_is_told_and_ends_nothing(scheduler: Any, answer: Any, why: str) -> None:
    assert set_off(scheduler, Updater(answer)) == [why]


@pytest.mark.parametrize("newer", [True, False], ids=["with sessions", "with a draft model"])
def test_where_sglang_does_more_it_gets_a_request(scheduler: Any, newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def dispatch(request: Any) -> Any:
        seen.append(request)
        return SimpleNamespace(success=len(seen) == 1, message="not now")

    monkeypatch.setattr(inside_scheduler, "loader_request", lambda *told: told)
    scheduler._request_dispatcher = dispatch
    if newer:
        scheduler.weight_updater.begin_weight_update = None
    else:
        scheduler.draft_worker = object()
    updater = Updater()
    assert set_off(scheduler, updater) == [""]
    assert set_off(scheduler, updater) == ["not now"]
    assert seen == [("loader", "text", 1)] * 2
    assert updater.called == []


def test_requests_go_first(scheduler: Any) -> None:
    """What was there before an errand is seen to before it."""
    seen: list[Any] = []
    scheduler._request_dispatcher = seen.append
    scheduler.rolloutmq_errands.put(lambda: seen.append("errand"))
    scheduler.process_input_requests(["request"])
    assert seen == ["request", "errand"]


# --- and the word that gets back -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("posted", "refusal", "whole"),
    [
        (TransferReport(ok=True, phase="done"), "", (True, True)),
        (TransferReport(ok=False, phase="load", error="no"), "", (False, True)),
        (None, "not now", (False, True)),
        (None, "", (False, True)),  # a release that says yes and calls nobody
        (TransferReport(ok=True, phase="done"), "the session could not be closed", (False, False)),
        (TransferReport(ok=False, phase="load", intact=False), "it raised", (False, False)),
        (TransferReport(ok=False, phase="load", error="no"), "it raised", (False, True)),
    ],
)
async def test_a_commit_is_what_the_loader_and_sglang_say_of_it(
    scheduler: Any, tmp_path: Path, posted: TransferReport | None, refusal: str, whole: tuple[bool, bool]
) -> None:
    server = ControlServer(str(tmp_path), 0, Receiver(torch.device("cpu")))

    class Runner(Updater):
        def update_weights_from_tensor(self, named_tensors: Any, load_format: str) -> Any:
            if posted is not None:
                server.post("ticket", posted)
            return not refusal, refusal

    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(weight_updater=Runner()))
    question = {"commit": "ticket", "loader": "loader", "told": "text", "timeout_s": 20.0}
    asked = asyncio.create_task(Channel(str(tmp_path)).ask(0, question))
    while not asked.done():
        scheduler.process_input_requests([])
        await asyncio.sleep(0)
    report = asked.result()
    assert (report.ok, report.intact) == whole, report
    assert refusal in report.error


async def test_an_answer_is_short_enough_to_be_written_at_once(scheduler: Any, tmp_path: Path) -> None:
    """It is written by the thread that runs the model, and whoever asked may be stopped."""

    class Runner(Updater):
        def update_weights_from_tensor(self, named_tensors: Any, load_format: str) -> Any:
            return False, "x" * (1 << 22)

    server = ControlServer(str(tmp_path), 0, Receiver(torch.device("cpu")))
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(weight_updater=Runner()))
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(socket_path(str(tmp_path), 0))
        question = {"commit": "ticket", "loader": "loader", "told": "text", "timeout_s": 20.0}
        asker.sendall(json.dumps(question).encode() + b"\n")
        await eventually(lambda: scheduler.process_input_requests([]) or select.select([asker], [], [], 0)[0])
        assert len(asker.recv(1 << 20)) < LONGEST_ERROR + 1000
    assert server is not None


async def test_a_commit_that_nobody_carries_out_is_not_waited_for_for_ever(scheduler: Any, tmp_path: Path) -> None:
    server = ControlServer(str(tmp_path), 0, Receiver(torch.device("cpu")))
    question = {"commit": "ticket", "loader": "loader", "told": "text", "timeout_s": 0.05}
    with pytest.raises(EngineError, match="does not answer"):
        await Channel(str(tmp_path)).ask(0, question)
    assert server is not None


async def test_a_scheduler_that_has_got_a_request_says_so_and_calls_nobody(scheduler: Any, tmp_path: Path) -> None:
    """Its request came first, and must be told of the update in SGLang's own order."""
    server, updater = ControlServer(str(tmp_path), 0, Receiver(torch.device("cpu"))), Updater()
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(weight_updater=updater))
    scheduler.running_batch.reqs = ["request"]
    question = {"commit": "ticket", "loader": "loader", "told": "text", "timeout_s": 20.0}
    asked = asyncio.create_task(Channel(str(tmp_path)).ask(0, question))
    while not asked.done():
        scheduler.process_input_requests([])
        await asyncio.sleep(0)
    assert (asked.result().ok, asked.result().phase, asked.result().intact) == (False, "ready", True)
    assert updater.called == []
    assert server is not None
