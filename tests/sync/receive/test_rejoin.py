"""An update that lies as the one before it: ready at once, and told of the digests while its buckets come."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.peers.peers import expected, version
from test_corruption import TIMEOUT_S, Rank, Stream

from rolloutmq.sync.receive.arriving import Arriving
from rolloutmq.sync.receive.pending import Kept, Pending
from rolloutmq.sync.receive.ways import standing_way
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.sync.wire.broadcaster import Broadcaster
from rolloutmq.sync.wire.store import EpochKeys


class Gone:
    """A connection that is none any more."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            raise RuntimeError("connection reset by peer")

        return call


class Quick(Rank):
    """Takes what comes over gloo as if it came over NCCL: queued ahead of the commit."""

    def update(self, snapshot: Snapshot, between: Any = None, **order: Any) -> TransferReport:
        return super().update(snapshot, between, transport="nccl", **order)


@pytest.fixture(params=[True, False], ids=["staged", "direct"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quick]:
    monkeypatch.setattr("torch.cuda.stream", lambda _: contextlib.nullcontext())
    made = Quick(staged=request.param, halves=False)
    if request.param:
        made.receiver.kept.streams = lambda: (Stream(), Stream())  # type: ignore[method-assign]
    assert made.update(version(1)).ok
    made.check_holds(version(1))
    yield made
    made.receiver.kept.wire.drop_group()
    made.line.broadcaster.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a receiver did, in its order."""
    seen: list[str] = []

    def noted(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(what)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    noted(Pending, "say_ready", "ready")
    noted(Arriving, "queue_ahead", "queued")
    noted(Kept, "hear", "told")
    return seen


def test_it_is_ready_before_it_is_told(rank: Quick, steps: list[str]) -> None:
    for number in (2, 3):
        report = rank.update(version(number))
        assert (report.ok, report.readback, report.nbytes) == (True, True, version(number).manifest.nbytes), report
        rank.check_holds(version(number))
    assert steps == ["ready", "queued", "told"] * 2


def test_another_layout_is_told_first(rank: Quick, steps: list[str]) -> None:
    """In a group of its own, which is the mark that there is something to hear first."""
    other, group = version(2, bucket_bytes=1024), rank.receiver.kept.wire.group
    assert rank.update(other).ok
    rank.check_holds(other)
    assert steps == ["told", "ready", "queued"]
    assert rank.receiver.kept.wire.group is not group


def test_a_flipped_bit_is_found_all_the_same(rank: Quick) -> None:
    honest = version(2)
    buckets = [bucket.clone() for bucket in honest.buckets]
    buckets[-1][0] ^= 1
    report = rank.update(Snapshot(honest.manifest, tuple(buckets)))
    assert (report.ok, report.intact) == (False, rank.staged)
    assert "tensor " in report.error
    if report.intact:
        assert rank.bits() == expected(version(1))


def test_a_version_that_lies_otherwise_than_announced_is_refused(rank: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rank.bits()
    hear = Kept.hear

    def lied(self: Kept, *args: Any) -> Any:
        return dataclasses.replace(hear(self, *args), layout="0" * 32)

    monkeypatch.setattr(Kept, "hear", lied)
    report = rank.update(version(2))
    assert (report.ok, report.intact, report.phase) == (False, True, "rendezvous")
    assert "is not the one in its group's name" in report.error
    assert rank.bits() == before
    monkeypatch.undo()


def test_a_sender_that_is_gone_is_not_taken_for_the_one_that_was(rank: Quick) -> None:
    """It is looked for anew."""
    group = rank.receiver.kept.wire.group
    assert group is not None
    (order,) = rank.line.begin(version(2), [group.name], timeout_s=TIMEOUT_S, transport="nccl").orders
    lose_connection(rank)
    way = standing_way(rank.receiver.kept, order, time.monotonic() + TIMEOUT_S)
    assert way is not None
    assert not way.restart()
    assert way.arriving is None
    rank.line.broadcaster.give_up("over")


def lose_connection(rank: Quick) -> None:
    host, port, _ = rank.receiver.kept.wire._store  # type: ignore[misc]
    rank.receiver.kept.wire._store = host, port, Gone()


def test_a_lost_connection_costs_no_group(rank: Quick) -> None:
    """The sender is there, and stands in the group as this one does: it would wait for nobody to make it anew."""
    group = rank.receiver.kept.wire.group
    lose_connection(rank)
    report = rank.update(version(2))
    assert report.ok, report
    rank.check_holds(version(2))
    assert rank.receiver.kept.wire.group is group


def test_a_restarted_sender_has_no_part_in_a_group_of_that_name(rank: Quick) -> None:
    wire, other = rank.receiver.kept.wire, Broadcaster("127.0.0.1", 0)
    assert wire.group is not None
    order = dataclasses.replace(
        rank.line.begin(version(2), [wire.group.name], timeout_s=TIMEOUT_S).orders[0], port=other.store.port
    )
    rank.line.broadcaster.give_up("over")
    wire.newest = order
    wire.store(order, time.monotonic() + TIMEOUT_S)
    assert wire.group is None
    other.close()


def test_who_was_ready_for_another_transfer_of_that_number_is_not_taken_for_ready(rank: Quick) -> None:
    """Numbers of transfers begin again in a Redis that lost its data."""
    broadcaster = rank.line.broadcaster
    left = [EpochKeys(1).ready(1), EpochKeys(2).ready(1)]
    for key in left:
        broadcaster.store.set(key, "1")
    broadcaster.offer(2, version(2))
    assert broadcaster.store.check(left)  # the newest so far is 1: nobody was ready for 2 before
    broadcaster.offer(1, version(1))
    assert not broadcaster.store.check(left[:1])
