"""An engine hands a version on out of its own parameters: bit by bit what the trainer sent, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.peers.peer_sender import Holder, order_of
from support.peers.peers import SHAPES, Peer, expected, version

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.receive.lend import send_held
from rolloutmq.worker.sglang.weights import send_weights


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    return Holder(tmp_path / "snapshots")


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    try:
        assert made.hear() == "up"
        yield made
    finally:
        made.end()


def test_every_bit_is_the_trainers(holder: Holder, peer: Peer) -> None:
    for number in (1, 2):
        snapshot = version(number)
        read = holder.read(snapshot)
        assert (read.ok, read.phase, read.readback) == (True, "done", True), read
        sent, got = holder.send_to(peer, number)
        assert (sent.ok, sent.phase, sent.nbytes) == (True, "done", snapshot.manifest.nbytes), sent
        assert got is not None
        assert (got.ok, got.phase, got.readback) == (True, "done", True), got
        assert peer.ask(digests=True) == expected(snapshot)
        assert holder.model.digests() == expected(snapshot)


def test_a_bit_that_flipped_in_the_peers_memory_is_found_by_who_receives_it(holder: Holder, peer: Peer) -> None:
    assert holder.read(version(1)).ok
    bad = dict(holder.model.named_parameters())["layer/down"]
    bad.data.view(torch.int16)[3, 7] ^= 1
    sent, got = holder.send_to(peer, 1)
    assert sent.ok
    assert got is not None
    assert (got.ok, got.phase, got.intact) == (False, "verify", True)
    assert "tensor layer.down: digest" in got.error


def test_what_the_engine_does_not_hold_is_not_sent(holder: Holder, tmp_path: Path) -> None:
    assert "does not hold version 1" in send_held(holder.receiver, holder.order(1)).error
    assert holder.read(version(1)).ok
    report = send_held(holder.receiver, holder.order(2))
    assert (report.ok, report.intact) == (False, True)
    assert "does not hold version 2" in report.error
    converted = Holder(tmp_path / "converted", dtype=torch.float32)  # of bfloat16 tensors
    assert converted.read(version(1)).ok
    report = send_held(converted.receiver, converted.order(1))
    assert "PlanImpossible: the engine does not hold embed whole and as it was sent" in report.error


def test_a_version_that_did_not_arrive_whole_is_not_held(holder: Holder) -> None:
    assert holder.read(version(1)).ok
    other = PackedWeights(2, {name: torch.zeros(shape) for name, shape in [*SHAPES.items()][:-1]}, 512).snapshot()
    refused = holder.read(other)  # a tensor is missing: told before anything is written
    assert (refused.ok, refused.intact) == (False, True)
    assert "missing for" in refused.error
    holder.receiver._held = None
    assert "does not hold" in send_held(holder.receiver, holder.order(1)).error


def test_a_tensor_parallel_engine_refuses() -> None:
    report = asyncio.run(send_weights("nowhere", order_of(1, 1), tp_size=2))
    assert (report.ok, report.intact) == (False, True)
    assert "tensor-parallel" in report.error


def test_nothing_is_loaded_while_it_is_sent(holder: Holder) -> None:
    assert holder.read(version(1)).ok
    with holder.receiver.lending(1):
        report = holder.receiver.commit(7, holder.model)
        assert (report.ok, report.intact) == (False, True)
        assert "is sending its weights" in report.error
        assert "takes part in a transfer itself" in send_held(holder.receiver, holder.order(1)).error
    assert holder.receiver.prepare(order_of(1, -9, transport="disk", path=str(holder.folder))).ok
    with holder.receiver.lending(1):  # what was prepared and not committed is dropped
        pass
    assert "not prepared" in holder.receiver.commit(-9, holder.model).error
    assert holder.read(version(2)).ok
    assert holder.model.digests() == expected(version(2))


@pytest.mark.slow
def test_a_send_that_is_given_up_ends_at_once_on_both_sides(holder: Holder, peer: Peer) -> None:
    assert holder.read(version(1)).ok
    sent, got = holder.send_to(peer, 1, give_up="a newer version is announced")
    assert not sent.ok
    assert "a newer version is announced" in sent.error
    assert got is not None
    assert not got.ok
    sent, got = holder.send_to(peer, 1)
    assert sent.ok
    assert got is not None
    assert got.ok
