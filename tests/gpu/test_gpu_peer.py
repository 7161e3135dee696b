"""A worker's engine on one GPU hands its version to one on another: `pytest tests/gpu/test_gpu_peer.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.peers.peer_sender import Holder
from support.peers.peers import Peer, expected, version

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@pytest.fixture(params=["on", "off"], ids=["staged", "direct"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    made = Peer("cuda:1", staging=request.param)
    try:
        assert made.hear() == "up"
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_every_bit_is_the_trainers(peer: Peer, tmp_path: Path, transport: str) -> None:
    holder = Holder(tmp_path, "cuda:0")
    for number in (1, 2, 3):
        snapshot = version(number, "cuda:0")
        read = holder.read(snapshot)
        assert (read.ok, read.readback) == (True, True), read
        sent, got = holder.send_to(peer, number, transport=transport)
        assert sent.ok, sent
        assert got is not None
        assert (got.ok, got.phase, got.readback) == (True, "done", True), got
        assert peer.ask(digests=True) == expected(snapshot)


def test_buckets_that_are_filled_again_do_not_overtake_their_broadcast(peer: Peer, tmp_path: Path) -> None:
    """Many buckets through two buffers."""
    holder = Holder(tmp_path, "cuda:0")
    snapshot = version(4, "cuda:0", bucket_bytes=64)
    assert len(snapshot.buckets) > 4
    assert holder.read(snapshot).ok
    sent, got = holder.send_to(peer, 4, transport="nccl")
    assert sent.ok, sent
    assert got is not None
    assert got.ok, got
    assert peer.ask(digests=True) == expected(snapshot)


def test_a_send_that_is_given_up_ends_at_once(peer: Peer, tmp_path: Path) -> None:
    holder = Holder(tmp_path, "cuda:0")
    assert holder.read(version(1, "cuda:0")).ok
    sent, got = holder.send_to(peer, 1, give_up="a newer version is announced", transport="nccl")
    assert not sent.ok
    assert "a newer version is announced" in sent.error
    assert got is not None
    assert not got.ok
    sent, got = holder.send_to(peer, 1, transport="nccl")
    assert sent.ok, sent
    assert got is not None
    assert got.ok, got
