"""The wire: from one process to others, through deaths at every point."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.peers.peers import Line, expected, line, version
from support.peers.soak import soak

TIMEOUT_S = 2.0


@pytest.fixture
def pair() -> Iterator[Line]:
    with line("cpu", "cpu") as made:
        yield made


def test_every_bit_arrives_and_the_group_stays(pair: Line) -> None:
    groups = set()
    for number in (1, 2, 3):
        snapshot = version(number)
        assert len(snapshot.buckets) > 2
        reports, error, _ = pair.transfer(snapshot)
        assert error is None
        for peer, report in zip(pair.peers, reports, strict=True):
            assert report is not None
            assert (report.ok, report.phase, report.readback) == (True, "done", True)
            assert peer.ask(digests=True) == expected(snapshot)
            groups.add(peer.group)
    assert len(groups) == 1


NEVER_S = 600.0
"""A timeout that a test does not live to see."""
POINTS = [("rendezvous", 1), ("ready", 1), ("broadcast", 2), ("verify", 1), ("load", 2)]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("at", "number"), POINTS)
def test_a_death_releases_the_others_and_the_next_transfer_goes_on(pair: Line, at: str, number: int, how: str) -> None:
    first, second = version(1), version(2)
    _, error, _ = pair.transfer(first)
    assert error is None
    victim, survivor = pair.peers
    victim.group = survivor.group = ""  # a new group, so that there is a rendezvous to die at
    victim.ask(fault={"at": at, "number": number, "how": how})
    # A death is told to the sender; a stop costs the deadline, where anybody waits for who is stopped.
    patient = how == "SIGKILL" or at in {"verify", "load"}
    reports, _, _ = pair.transfer(second, timeout_s=NEVER_S if patient else TIMEOUT_S)
    assert reports[0] is None
    late = at in {"verify", "load"}  # by then the other one has all it needs
    assert reports[1] is not None
    assert reports[1].ok == late
    assert reports[1].intact
    assert survivor.ask(digests=True) == expected(second if late else first)
    third = version(3)
    reports, error, _ = pair.transfer(third, [survivor])
    assert error is None
    assert reports[0] is not None
    assert reports[0].ok
    assert survivor.ask(digests=True) == expected(third)


@pytest.mark.slow
def test_updates_with_random_kills_stops_and_flipped_bits() -> None:
    found = soak(25, 2, "cpu", seed=1)
    assert (found["wrong"], found["hangs"]) == (0, 0)
    assert min(found["kills"], found["stops"], found["flips"], found["torn_sends"]) > 0, found
