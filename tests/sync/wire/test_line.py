"""From one process to others, bucket by bucket and in cells, through deaths at every point."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from support.peers.peers import Line, Peer, expected, line, order_from, version
from support.peers.soak import soak
from support.pools.pool import eventually

from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.sync.wire.relay_tree import DIRECT
from rolloutmq.worker.weights.follower import LINE_TROUBLE

NEVER_S = 600.0
"""A timeout that a test does not live to see."""
GLOO_S = 2.0
"""Of cells here: gloo, other than NCCL, is not broken off from outside, and who waits there waits for the deadline."""
PULLS = [("join", 1), ("fetch", 2), ("arrived", 2), ("verify", 3), ("load", 2), ("readback", 1)]
IN_CELLS = [("join", 1), ("rendezvous", 1), ("connect", 1), ("ready", 1), ("broadcast", 2), ("verify", 1), ("load", 2)]
SIGNALS = ("SIGKILL", "SIGSTOP")


@pytest.fixture
def three() -> Iterator[Line]:
    with line("cpu", "cpu", "cpu") as made:
        yield made


@pytest.fixture
def cell() -> Iterator[Line]:
    with line("cpu", "cpu", "cpu", cells=True, timeout_s=GLOO_S) as made:
        yield made


def check_whole(peer: Peer, report: TransferReport | None, number: int, way: str = "pull") -> None:
    assert (report.ok, report.phase, report.readback, report.way) == (True, "done", True, way), report
    assert peer.ask(digests=True) == expected(version(number))


def test_every_bit_arrives_from_whoever_has_it(three: Line) -> None:
    for number in (1, 2, 3):
        snapshot = version(number)
        assert len(snapshot.buckets) > 2
        for peer, report in zip(three.peers, three.transfer(snapshot), strict=True):
            check_whole(peer, report, number)
            assert report.holder


def test_every_bit_arrives_in_a_cell_and_its_group_stays(cell: Line) -> None:
    groups = set()
    for number in (1, 2, 3):
        for peer, report in zip(cell.peers, cell.transfer(version(number)), strict=True):
            check_whole(peer, report, number, "nccl")
            groups.add(peer.ask(group=True))
    assert len(groups - {""}) == 1


async def survived(
    made: Line, at: str, number: int, how: str, timeout_s: float = NEVER_S, *, stands: bool = False
) -> None:
    """The version comes to the two others at the first go, and to all who are left at the next."""
    victim, *others = made.peers
    assert all(report is not None and report.ok for report in made.transfer(version(1)))
    for peer in [] if stands else made.peers:
        peer.ask(leave=True)  # a new group, so that there is a rendezvous to die at
    victim.ask(fault={"at": at, "number": number, "how": how})
    reports = made.transfer(version(2), timeout_s=timeout_s)
    assert reports[0] is None
    for peer, report in zip(others, reports[1:], strict=True):
        check_whole(peer, report, 2, report.way)

    def named() -> str:
        made.hub.probe([victim.name])
        return made.hub.lost(victim.name)[0]

    why = await eventually(named)
    assert why.startswith("is stopped" if how == "SIGSTOP" else "was lost")
    assert [made.hub.lost(peer.name)[0] for peer in others] == ["", ""]
    for peer, report in zip(others, made.transfer(version(3), others, timeout_s=timeout_s), strict=True):
        check_whole(peer, report, 3, report.way)
    if how == "SIGSTOP":
        victim.signal(signal.SIGCONT)
        assert victim.hear() is not None  # what it makes of the version that it was stopped in
        (report,) = made.transfer(version(4), [victim], timeout_s=timeout_s)
        check_whole(victim, report, 4, report.way)


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize(("at", "number"), PULLS)
async def test_who_takes_buckets_dies_or_stops(three: Line, at: str, number: int, how: str) -> None:
    await survived(three, at, number, how)


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize(("at", "number"), IN_CELLS)
async def test_a_member_of_a_cell_dies_or_stops(cell: Line, at: str, number: int, how: str) -> None:
    """Its survivors take what they lack without a new group."""
    waits = at == "connect" or (how == "SIGSTOP" and at in {"rendezvous", "ready", "broadcast"})
    await survived(cell, at, number, how, GLOO_S if waits else NEVER_S)


@pytest.mark.parametrize("how", SIGNALS)
async def test_a_member_of_a_standing_cell_dies_or_stops(cell: Line, how: str) -> None:
    """The sender begins as soon as all have joined: nobody says once more that it is ready."""
    victim = cell.peers[0]
    assert all(report is not None and report.ok for report in cell.transfer(version(1)))
    victim.ask(fault={"at": "ready", "number": 1, "how": "SIGKILL"})
    assert all(report is not None and report.ok for report in cell.transfer(version(2)))
    await survived(cell, "broadcast", 1, how, GLOO_S if how == "SIGSTOP" else NEVER_S, stands=True)


@pytest.mark.parametrize(("at", "how"), [("amid", "SIGKILL"), ("amid", "SIGSTOP"), ("serve", "lie")])
async def test_a_source_dies_or_stops_amid_a_bucket_or_lies(three: Line, at: str, how: str) -> None:
    """Those who take the version from it take the rest from another one, and keep what they have."""
    bad, *others = three.peers
    sending = three.begin(version(1), [peer.name for peer in three.peers])
    orders = dict(zip(three.peers, sending.orders, strict=True))
    check_whole(bad, bad.update(orders[bad]), 1)
    sending.outgoing.sources.late = True  # the sender is spared: both take it from who has it
    sent = sending.outgoing.offer.sent_bytes
    bad.ask(fault={"at": at, "number": 2, "how": how})
    for peer in others:
        check_whole(peer, peer.update(orders[peer]), 1)
    if how == "lie":
        assert bad.ask(digests=True) == expected(version(1))
    else:
        assert bad.fell(how)
    copies = (sending.outgoing.offer.sent_bytes - sent) / version(1).manifest.nbytes
    assert 0 < copies < 2  # not again what had arrived


async def test_a_source_that_gives_up_amid_the_version_lets_those_go_who_wait_for_it(three: Line) -> None:
    bad, *others = three.peers
    sending = three.begin(version(1), [peer.name for peer in three.peers], timeout_s=NEVER_S)
    orders = dict(zip(three.peers, sending.orders, strict=True))
    bad.ask(fault={"at": "arrived", "number": 2, "how": "raise"})
    report = bad.update(orders[bad])
    assert (report.ok, report.intact, report.phase) == (False, True, "receive"), report
    sending.outgoing.sources.late = True
    for peer in others:
        check_whole(peer, peer.update(orders[peer]), 1)


async def test_the_sender_gives_a_few_copies_and_receivers_the_rest() -> None:
    with line(*["cpu"] * (DIRECT + 2)) as many:
        snapshot = version(1)
        sending = many.begin(snapshot, [peer.name for peer in many.peers])
        for peer, order in zip(many.peers, sending.orders, strict=True):
            check_whole(peer, peer.update(order), 1)
        assert sending.outgoing.offer.sent_bytes == DIRECT * sum(bucket.numel() for bucket in snapshot.buckets)


@pytest.mark.parametrize("cells", [False, True], ids=["pulls", "cell"])
async def test_a_sender_that_leaves_amid_a_version(cells: bool) -> None:
    """Whoever has it all serves it; who has not says so, and has the old version whole."""
    with line("cpu", "cpu", cells=cells, timeout_s=GLOO_S) as made:
        one, two = made.peers
        assert all(report is not None and report.ok for report in made.transfer(version(1)))
        sending = made.begin(version(2), [one.name, two.name])
        two.ask(fault={"at": "broadcast" if cells else "fetch", "number": 2, "how": "SIGSTOP"})
        for peer, order in zip(made.peers, sending.orders, strict=True):
            peer.say(prepare=asdict(order))
        await eventually(lambda: two.stopped)
        if not cells:
            report = one.hear()
            assert report["ok"], report
        made.close()
        two.signal(signal.SIGCONT)
        report = two.hear()
        assert (report["ok"], report["intact"]) == (False, True), report
        assert report["phase"] in LINE_TROUBLE
        assert two.ask(digests=True) == expected(version(1))
        if not cells:
            late = order_from([one.ask(address=True)], sending.outgoing.token, version(2))
            check_whole(two, two.update(late), 2)


@pytest.mark.slow
def test_updates_with_random_kills_stops_and_flipped_bits() -> None:
    found = soak(25, 3, "cpu", seed=5)
    assert (found["wrong"], found["hangs"], found["blamed"]) == (0, 0, 0), found
    assert min(found["kills"], found["stops"], found["flips"], found["lies"], found["torn_sends"]) > 0, found
