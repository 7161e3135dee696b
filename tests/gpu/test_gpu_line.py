"""The wire between GPUs: NCCL, deaths under it, and CUDA IPC on one GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from support.peers.peers import SLACK_S, Line, Peer, expected, line, version

from rolloutmq.messages.errors import TransferTimeout
from rolloutmq.sync.tensors.staging import ROTATING

TIMEOUT_S = 6.0
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@pytest.fixture(params=["on", "off"], ids=["staged", "direct"])
def pair(request: pytest.FixtureRequest) -> Iterator[Line]:
    with line("cuda:1", staging=request.param) as made:
        yield made


def test_every_bit_arrives_and_the_group_stays(pair: Line) -> None:
    (peer,), groups = pair.peers, set()
    for number in (1, 2, 3):
        snapshot = version(number, "cuda:0")
        (report,), error, _ = pair.transfer(snapshot)
        assert error is None
        assert report is not None
        assert (report.ok, report.phase, report.readback) == (True, "done", True), report
        assert peer.ask(digests=True) == expected(snapshot)
        groups.add(peer.group)
    assert len(groups) == 1


def test_a_copy_in_host_memory_is_sent_all_the_same(pair: Line) -> None:
    from rolloutmq.sync.packing.packing import PackedWeights  # noqa: PLC0415

    tensors = dict(version(1, "cuda:0").tensors())
    snapshot = PackedWeights(1, tensors, 512, keep="host").snapshot()
    assert snapshot.device.type == "cpu"
    (report,), error, _ = pair.transfer(snapshot, transport="gloo")
    assert error is None
    assert report is not None
    assert report.ok, report
    assert pair.peers[0].ask(digests=True) == expected(snapshot)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("at", "number"), [("rendezvous", 1), ("ready", 1), ("broadcast", 2)])
def test_a_death_releases_the_sender_and_its_next_transfer_goes_on(pair: Line, at: str, number: int, how: str) -> None:
    (victim,) = pair.peers
    _, error, _ = pair.transfer(version(1, "cuda:0"))
    assert error is None
    victim.group = ""
    victim.ask(fault={"at": at, "number": number, "how": how})
    (report,), error, seconds = pair.transfer(version(2, "cuda:0"), timeout_s=TIMEOUT_S)
    assert report is None
    assert seconds < TIMEOUT_S + 3 * SLACK_S
    print(at, how, f"{seconds:.2f} s", repr(error))
    victim.end()
    other = Peer("cuda:1")
    try:
        assert other.hear() == "up"
        third = version(3, "cuda:0")
        (report,), error, _ = pair.transfer(third, [other])
        assert error is None
        assert report is not None
        assert report.ok
        assert other.ask(digests=True) == expected(third)
    finally:
        other.end()


def test_a_sender_that_stops_in_the_midst_releases_the_receiver(pair: Line) -> None:
    """It queues one bucket less than the manifest says."""
    from dataclasses import replace  # noqa: PLC0415

    (peer,), first, second = pair.peers, version(1, "cuda:0"), version(2, "cuda:0")
    _, error, _ = pair.transfer(first)
    assert error is None
    torn = replace(second, buckets=second.buckets[:-1])
    (report,), error, seconds = pair.transfer(torn, timeout_s=TIMEOUT_S)
    assert report is not None
    assert not report.ok
    assert seconds < TIMEOUT_S + 3 * SLACK_S
    if report.intact:
        assert peer.ask(digests=True) == expected(first)
    third = version(3, "cuda:0")
    (report,), error, _ = pair.transfer(third)
    assert error is None
    assert report is not None
    assert report.ok, report
    assert peer.ask(digests=True) == expected(third)


def test_what_nobody_commits_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """Broadcasts that were queued ahead; the peer's GPU is of use again after the deadline."""
    # Some of them are not queued ahead, and each is more than NCCL would take off the sender's hands by itself.
    shapes = {f"layer{number}": [4096, 8192] for number in range(2 * ROTATING)}
    with line("cuda:1", staging="off", shapes=shapes) as made:
        (peer,) = made.peers
        first, second, third = (version(number, "cuda:0", shapes, 1 << 26) for number in (1, 2, 3))
        assert len(second.buckets) == 2 * ROTATING
        _, error, _ = made.transfer(first)
        assert error is None
        (report,), error, seconds = made.transfer(second, timeout_s=TIMEOUT_S, after_prepare=False)
        assert report is not None
        assert (report.ok, report.phase) == (True, "ready")
        assert isinstance(error, TransferTimeout)
        assert seconds < TIMEOUT_S + 3 * SLACK_S
        assert peer.ask(digests=True) == expected(first)
        (report,), error, _ = made.transfer(third)
        assert error is None
        assert report is not None
        assert report.ok, report
        assert peer.ask(digests=True) == expected(third)
    assert "frame #" not in capfd.readouterr().err  # torch's stack traces of what broke off


def test_a_death_amid_a_large_bucket_prints_no_stack(capfd: pytest.CaptureFixture[str]) -> None:
    shapes = {f"layer{number}": [8192, 8192] for number in range(8)}
    with line("cuda:1", staging="on", shapes=shapes) as made:
        (peer,) = made.peers
        first, second = (version(number, "cuda:0", shapes, 1 << 27) for number in (1, 2))
        _, error, _ = made.transfer(first)
        assert error is None
        peer.ask(fault={"at": "broadcast", "number": 4, "how": "SIGKILL"})
        (report,), error, _ = made.transfer(second, timeout_s=TIMEOUT_S)
        assert report is None
        assert isinstance(error, TransferTimeout)
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
        made.transfer(snapshot, transport="ipc", after_prepare=how != "never committed")
        assert torch.cuda.memory_allocated(0) - before >= snapshot.manifest.nbytes
        del snapshot
        gc.collect()
        assert torch.cuda.memory_allocated(0) == before


def test_on_one_gpu_the_buckets_are_handed_over() -> None:
    with line("cuda:0") as made:
        for number in (1, 2, 3):
            snapshot = version(number, "cuda:0")
            (report,), error, _ = made.transfer(snapshot, transport="ipc")
            assert error is None
            assert report is not None
            assert (report.ok, report.phase, report.readback) == (True, "done", True), report
            assert made.peers[0].ask(digests=True) == expected(snapshot)
