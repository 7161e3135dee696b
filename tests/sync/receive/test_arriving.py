"""Buckets that come while their manifest is read and the commit is on its way: queued ahead, watched, ended."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pools.pool import eventually

from rolloutmq.messages.errors import TransferTimeout
from rolloutmq.sync.receive.arriving import Arriving
from rolloutmq.sync.wire import group

BUCKETS, BUFFERS = 5, 2
CURRENT: list[Stream] = []


class Stream:
    """A stream on which everything is over at once, or never."""

    def __init__(self, wire: Wire, *, working: bool) -> None:
        self._wire, self.working = wire, working

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self._wire.answers or self._wire.aborted


class Wire:
    """A group that notes what is asked of it. answers: whether everything is over at once, or nothing ever."""

    name = "group"

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.waited: list[int] = []
        """By the stream that is worked on."""
        self.answers, self.aborted = True, False
        self.ways = weakref.WeakSet[Way]()
        """Which somebody keeps."""

    def broadcast(self, buffer: torch.Tensor, deadline: float) -> Way:
        self.seen.append(int(buffer[0]))
        self.ways.add(way := Way(self, self.seen[-1]))
        return way

    def abort(self) -> None:
        self.aborted = True


class Way:
    """A broadcast on its way."""

    def __init__(self, wire: Wire, bucket: int) -> None:
        self._wire, self._bucket = wire, bucket

    def wait(self) -> None:
        if CURRENT[-1].working:
            self._wire.waited.append(self._bucket)


class Noted:
    """In the place of an Arrival and of a Loading."""

    def __init__(self, wire: Wire) -> None:
        self.arrived: list[int] = []
        self.loaded: list[int] = []
        self.waited_for: list[int] = []
        self.beside: list[int] = []
        self._wire = wire

    def queue(self, bucket: int) -> None:
        assert self._wire.waited[-1] == bucket
        self.arrived.append(bucket)

    def load(self, bucket: int, *, beside_wire: bool) -> None:
        assert bucket in self.arrived
        self.loaded.append(bucket)
        if beside_wire:
            self.beside.append(bucket)
        self.waited_for.append(len(self._wire.waited))

    def queue_readback(self, bucket: int, *, count: bool) -> None:
        assert self.loaded[-1] == bucket
        assert not count


def arriving(wire: Wire, noted: Noted, broken: Callable[[], str] = lambda: "", seconds: float = 20.0) -> Arriving:
    return Arriving(
        wire,
        [torch.full((4,), index, dtype=torch.uint8) for index in range(BUCKETS)],
        buffers=BUFFERS,
        streams=(Stream(wire, working=False), Stream(wire, working=True)),
        arrival=noted,  # type: ignore[arg-type]
        deadline=time.monotonic() + seconds,
        broken=broken,
    )


@contextlib.contextmanager
def current(stream: Stream) -> Iterator[None]:
    CURRENT.append(stream)
    yield
    CURRENT.pop()


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", current)


@pytest.mark.parametrize("ahead", ["no", "settled", "at once"])
def test_every_bucket_is_loaded_once_and_no_buffer_is_taken_twice(ahead: str) -> None:
    wire = Wire()
    noted = Noted(wire)
    made = arriving(wire, noted)
    if ahead != "no":
        made.queue_ahead()
        assert wire.seen == list(range(BUFFERS))
        assert wire.waited == []
        made.watch()
        made.take()
    if ahead == "settled":
        made.settle_ahead()
        assert noted.arrived == list(range(BUFFERS))
    assert not made.complete
    made.load(noted, readback=True)  # type: ignore[arg-type]
    assert wire.seen == wire.waited == noted.arrived == noted.loaded == list(range(BUCKETS))
    first = BUFFERS if ahead == "settled" else 1
    assert noted.waited_for == [max(first, index + 1) for index in range(BUCKETS)]  # and for none that comes later
    # Not the last one; nor the first if no other could come before there is room again.
    assert noted.beside == list(range(1 if ahead == "settled" else 0, BUCKETS - 1))
    assert made.complete
    made.abandon()
    assert not wire.aborted


@pytest.mark.parametrize(("reason", "seconds"), [("the trainer is gone", 20.0), ("", 0.1)])
async def test_what_nobody_takes_is_ended(reason: str, seconds: float) -> None:
    """Or it would stay on the GPU for ever."""
    wire = Wire()
    wire.answers = False
    made = arriving(wire, Noted(wire), lambda: reason, seconds)
    made.queue_ahead()
    made.watch()
    await eventually(lambda: wire.aborted)
    with pytest.raises(TransferTimeout, match=reason or "the time for it is over"):
        made.take()


def test_what_was_taken_is_left_alone() -> None:
    wire, asked = Wire(), []
    made = arriving(wire, Noted(wire), lambda: asked.append(1) or "broken", 0.0)  # type: ignore[func-returns-value]
    made.queue_ahead()
    made.take()
    made._watch()  # whose turn comes just now
    assert not wire.aborted
    made.abandon()
    assert wire.aborted


def test_what_is_loaded_keeps_no_broadcast() -> None:
    wire = Wire()
    noted = Noted(wire)
    loaded = arriving(wire, noted)
    loaded.load(noted, readback=True)
    assert len(wire.ways) == len(wire.seen)
    loaded.forget()
    assert not wire.ways
    assert loaded.complete


def test_a_wait_for_what_is_ahead_ends() -> None:
    """The engine's own thread would stand still for as long."""
    wire = Wire()
    wire.answers = False
    made = arriving(wire, Noted(wire), seconds=0.1)
    made.queue_ahead()
    with pytest.raises(TransferTimeout, match="in time"):
        made.settle_ahead()
    assert wire.aborted
    assert not made.complete


@pytest.mark.parametrize("when", ["taken", "settled", "loaded"])
def test_broadcasts_that_an_abort_ended_are_not_taken_for_arrivals(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that breaks off ends the kernels here, too: long before anybody looks, the events have happened."""
    monkeypatch.setattr(group, "AT_ONCE_S", 0.0)
    why = [""]
    wire = Wire()
    noted = Noted(wire)
    made = arriving(wire, noted, lambda: why[0])
    made.queue_ahead()
    if when != "taken":
        made.take()
    why[0] = "the trainer broke off"
    steps = {"taken": made.take, "settled": made.settle_ahead, "loaded": lambda: made.load(noted, readback=False)}  # type: ignore[arg-type]
    with pytest.raises(TransferTimeout, match="the trainer broke off"):
        steps[when]()
    assert not made.complete


async def test_the_watch_asks_before_it_believes_that_all_has_come() -> None:
    wire = Wire()
    made = Arriving(
        wire,
        [torch.zeros(4, dtype=torch.uint8)],
        buffers=1,
        streams=(Stream(wire, working=False), Stream(wire, working=True)),
        arrival=None,
        deadline=time.monotonic() + 20,
        broken=lambda: "the trainer broke off",
    )
    made.queue_ahead()
    made.watch()
    await eventually(lambda: wire.aborted)
    with pytest.raises(TransferTimeout, match="broke off"):
        made.take()


def test_what_nothing_is_compared_of_is_asked_about() -> None:
    """An abort ends the kernels within the time in which nobody asks, and no digest would tell."""
    wire = Wire()
    made = arriving(wire, Noted(wire), lambda: "the trainer broke off")
    made._arrival = None
    with pytest.raises(TransferTimeout, match="the trainer broke off"):
        made.load(SimpleNamespace(load=lambda bucket, beside_wire: None), readback=False)  # type: ignore[arg-type]
    assert not made.complete
