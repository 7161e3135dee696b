"""An update that lies as the one before it: told in brief, and its group stays, whatever became of a connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.peers.peer_process import without_streams
from support.peers.peers import Line, version
from test_corruption import TIMEOUT_S, Rank

from rolloutmq.sync.receive import state
from rolloutmq.sync.wire.lines import Place
from rolloutmq.sync.wire.store import broadcast_key, serve_store


class Gone:
    """A connection that is none any more."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            raise RuntimeError("connection reset by peer")

        return call


@pytest.fixture(params=["pulled", "staged", "direct"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    without_streams(monkeypatch.setattr)
    made = Rank(request.param, halves=False)
    assert made.update(version(1)).ok
    made.check_holds(version(1))
    yield made
    made.receiver.state.lines.forget()
    made.line.close()


in_cells = pytest.mark.parametrize("rank", ["staged", "direct"], indirect=True)


@pytest.fixture
def manifests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions whose manifest was fetched."""
    seen, fetch = [], state.fetch_manifest

    def noted(order: Any) -> Any:
        seen.append(order.version)
        return fetch(order)

    monkeypatch.setattr(state, "fetch_manifest", noted)
    return seen


def test_what_lies_as_before_is_told_in_brief(rank: Rank, manifests: list[int]) -> None:
    for number in (2, 3):
        report = rank.update(version(number))
        assert (report.ok, report.readback, report.nbytes) == (True, True, version(number).manifest.nbytes), report
        rank.check_holds(version(number))
    assert manifests == []
    other = version(4, bucket_bytes=1024)
    assert rank.update(other).ok
    rank.check_holds(other)
    assert manifests == [4]


@in_cells
def test_another_layout_needs_no_new_group(rank: Rank) -> None:
    group = rank.receiver.state.lines.group
    assert rank.update(version(2, bucket_bytes=1024)).ok
    assert rank.receiver.state.lines.group is group


def test_a_sender_that_started_again_is_joined_anew(rank: Rank) -> None:
    """At another address: nothing of the first one's is of use there."""
    rank.line.close()
    group, rank.line = rank.receiver.state.lines.group, Line(cells=rank.way != "pulled")
    report = rank.update(version(2))
    assert report.ok, report
    rank.check_holds(version(2))
    assert group is None or rank.receiver.state.lines.group is not group


def lose_connection(rank: Rank) -> None:
    lines = rank.receiver.state.lines
    sender, port, _ = lines._store  # type: ignore[misc]
    sender.close()
    lines._store = sender, port, Gone()


@in_cells
def test_a_lost_connection_costs_no_group(rank: Rank) -> None:
    """The sender is there, and stands in the group as this one does: it would wait for nobody to make it anew."""
    group = rank.receiver.state.lines.group
    lose_connection(rank)
    report = rank.update(version(2))
    assert report.ok, report
    rank.check_holds(version(2))
    assert rank.receiver.state.lines.group is group


@in_cells
def test_a_restarted_sender_has_no_part_in_a_group_of_that_name(rank: Rank) -> None:
    lines, other = rank.receiver.state.lines, serve_store("127.0.0.1")
    (order,) = rank.line.begin(version(2), ["w"]).orders
    lines.newest = order
    lines.store(order, Place(lines.group.name, "1", 1, 2, other.port, go=False), time.monotonic() + TIMEOUT_S)
    assert lines.group is None


@in_cells
def test_who_was_ready_for_another_broadcast_is_not_taken_for_ready(rank: Rank) -> None:
    """Each broadcast of a sender has a number of its own, whatever version it is of."""
    numbers = []
    for number in (2, 3, 3):
        assert rank.update(version(number)).ok
        assert len(rank.line.hub._cells._cells) == 1
        numbers.append(str(rank.line.hub._cells._numbers))
    assert len({broadcast_key(number, "ready/1") for number in numbers}) == len(numbers)
