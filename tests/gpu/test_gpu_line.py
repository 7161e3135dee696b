"""The wire between GPUs: cells over NCCL, deaths in them, what comes bucket by bucket, and CUDA IPC on one GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.peers.peers import Line, Peer, expected, line, order_from, version

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.tensors.staging import ROTATING
from rolloutmq.sync.transfer.order import TransferReport

TIMEOUT_S = 6.0
BIG = {f"layer{number}": [8192, 8192] for number in range(8)}
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@pytest.fixture(params=["on", "off"], ids=["staged", "direct"])
def pair(request: pytest.FixtureRequest) -> Iterator[Line]:
    with line("cuda:1", staging=request.param) as made:
        yield made


def check(line: Line, snapshot: Snapshot, way: str, peer: Peer | None = None) -> TransferReport:
    """One transfer to one peer, which has every bit of it by this way."""
    peer = peer or line.peers[0]
    (report,) = line.transfer(snapshot, [peer])
    assert report is not None
    assert (report.ok, report.phase, report.readback, report.way) == (True, "done", True, way), report
    assert peer.ask(digests=True) == expected(snapshot)
    return report


def test_every_bit_arrives_and_the_cell_stays(pair: Line) -> None:
    groups = set()
    for number in (1, 2, 3):
        check(pair, version(number, "cuda:0"), "nccl")
        groups.add(pair.peers[0].ask(group=True))
    assert len(groups) == 1


def test_a_copy_in_host_memory_is_broadcast_all_the_same(pair: Line) -> None:
    tensors = dict(version(1, "cuda:0").tensors())
    snapshot = PackedWeights(1, tensors, 512, keep="host").snapshot()
    assert snapshot.device.type == "cpu"
    check(pair, snapshot, "nccl")


def test_without_nccl_it_comes_bucket_by_bucket(pair: Line) -> None:
    pair.hub._gpu_direct = False
    for number in (1, 2):
        check(pair, version(number, "cuda:0"), "pull")


def test_who_has_it_on_a_gpu_gives_it_to_others_when_the_trainer_is_gone(pair: Line) -> None:
    """Out of the buckets that it keeps, or out of its parameters."""
    snapshot = version(1, "cuda:0")
    sending = pair.begin(snapshot, [pair.peers[0].name])
    report = pair.peers[0].update(sending.orders[0])
    assert report is not None
    assert report.ok, report
    pair.close()
    other = Peer("cuda:1")
    try:
        assert other.hear() == "up"
        got = other.update(order_from([report.holder], sending.outgoing.token, snapshot))
        assert got is not None
        assert (got.ok, got.way) == (True, "pull"), got
        assert other.ask(digests=True) == expected(snapshot)
    finally:
        other.end()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("at", "number"), [("rendezvous", 1), ("ready", 1), ("broadcast", 2)])
def test_a_death_releases_the_sender_and_its_next_transfer_goes_on(pair: Line, at: str, number: int, how: str) -> None:
    (victim,) = pair.peers
    check(pair, version(1, "cuda:0"), "nccl")
    victim.ask(leave=True)
    victim.ask(fault={"at": at, "number": number, "how": how})
    (report,) = pair.transfer(version(2, "cuda:0"), timeout_s=TIMEOUT_S)
    assert report is None
    victim.end()
    other = Peer("cuda:1")
    try:
        assert other.hear() == "up"
        check(pair, version(3, "cuda:0"), "nccl", other)
    finally:
        other.end()


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="takes three GPUs")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("staging", ["on", "off"])
def test_in_a_cell_the_others_get_the_version_that_a_death_broke(how: str, staging: str) -> None:
    with line("cuda:1", "cuda:2", staging=staging) as made:
        other, victim = made.peers
        assert all(report is not None and report.way == "nccl" for report in made.transfer(version(1, "cuda:0")))
        victim.ask(fault={"at": "broadcast", "number": 2, "how": how})
        second = version(2, "cuda:0")
        report, lost = made.transfer(second)
        assert lost is None
        assert report is not None
        assert report.ok, report
        assert other.ask(digests=True) == expected(second)
        check(made, version(3, "cuda:0"), "nccl", other)


def test_a_sender_that_stops_in_the_midst_releases_the_receiver(pair: Line) -> None:
    """It queues one bucket less than the manifest says."""
    (peer,), first, second = pair.peers, version(1, "cuda:0"), version(2, "cuda:0")
    check(pair, first, "nccl")
    (report,) = pair.transfer(replace(second, buckets=second.buckets[:-1]), timeout_s=TIMEOUT_S)
    assert report is not None
    assert not report.ok
    if report.intact:
        assert peer.ask(digests=True) == expected(first)
    (report,) = pair.transfer(version(3, "cuda:0"))
    assert report is not None
    assert report.ok, report
    assert peer.ask(digests=True) == expected(version(3, "cuda:0"))


def test_what_nobody_commits_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """Broadcasts that were queued ahead; the peer's GPU is of use again after the deadline."""
    # Some of them are not queued ahead, and each is more than NCCL would take off the sender's hands by itself.
    shapes = {f"layer{number}": [4096, 8192] for number in range(2 * ROTATING)}
    with line("cuda:1", staging="off", shapes=shapes) as made:
        made.hub._timeout_s = TIMEOUT_S
        (peer,) = made.peers
        first, second, third = (version(number, "cuda:0", shapes, 1 << 26) for number in (1, 2, 3))
        assert len(second.buckets) == 2 * ROTATING
        check(made, first, "nccl")
        (report,) = made.transfer(second, timeout_s=TIMEOUT_S, after_prepare=False)
        assert report is not None
        assert (report.ok, report.phase) == (True, "ready")
        assert peer.ask(digests=True) == expected(first)
        (report,) = made.transfer(third)
        assert report is not None
        assert report.ok, report
        assert peer.ask(digests=True) == expected(third)
    assert "frame #" not in capfd.readouterr().err  # torch's stack traces of what broke off


def test_a_death_amid_a_large_bucket_prints_no_stack(capfd: pytest.CaptureFixture[str]) -> None:
    with line("cuda:1", staging="on", shapes=BIG) as made:
        (peer,) = made.peers
        first, second = (version(number, "cuda:0", BIG, 1 << 27) for number in (1, 2))
        check(made, first, "nccl")
        peer.ask(fault={"at": "broadcast", "number": 4, "how": "SIGKILL"})
        (report,) = made.transfer(second, timeout_s=TIMEOUT_S)
        assert report is None
    assert "frame #" not in capfd.readouterr().err


@pytest.mark.parametrize("how", ["committed", "never committed", "killed"])
def test_no_memory_of_the_trainers_is_kept_for_a_receiver(how: str) -> None:
    """Whatever becomes of who opened the buckets: they are given back when the trainer lets go of them."""
    shapes = {"layer": [8192, 8192]}
    with line("cuda:0", shapes=shapes) as made:
        gc.collect()
        before = torch.cuda.memory_allocated(0)
        snapshot = version(1, "cuda:0", shapes, 1 << 27)
        if how == "killed":
            made.peers[0].ask(fault={"at": "load", "number": 1, "how": "SIGKILL"})
        made.transfer(snapshot, after_prepare=how != "never committed")
        assert torch.cuda.memory_allocated(0) - before >= snapshot.manifest.nbytes
        del snapshot
        gc.collect()
        assert torch.cuda.memory_allocated(0) == before


def test_on_one_gpu_the_buckets_are_handed_over() -> None:
    with line("cuda:0") as made:
        for number in (1, 2, 3):
            check(made, version(number, "cuda:0"), "ipc")
