"""Who has a version hands it on when the trainer is gone: bit by bit what the trainer sent, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.peers.peer_process import Linear, without_streams
from support.peers.peers import SHAPES, Line, expected, line, order_from, version
from test_corruption import Rank

from rolloutmq.messages.errors import WeightSyncError
from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.receive.state import CPU
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.sync.wire.shelf import Offer, Shelf


class Held:
    """Receivers that have taken version 1 from a trainer that is gone. at: their addresses. token: of the version."""

    def __init__(self, made: Line) -> None:
        self.peers = made.peers
        sending = made.begin(version(1), [peer.name for peer in made.peers])
        for peer, order in zip(made.peers, sending.orders, strict=True):
            report = peer.update(order)
            assert report.ok
        self.token, self.trainer = sending.outgoing.token, made.hub.address
        made.close()
        self.at = [peer.ask(address=True) for peer in made.peers]

    def order(self, *holders: int, **changed: Any) -> TransferOrder:
        made = order_from([self.at[index] for index in holders], self.token, version(1))
        return replace(made, **changed)


@pytest.fixture
def held() -> Iterator[Held]:
    with line("cpu", "cpu") as made:
        yield Held(made)


class Late:
    """A receiver in this process."""

    def __init__(self) -> None:
        self.receiver, self.model = Receiver(CPU), Linear(SHAPES, torch.bfloat16, CPU)

    def take(self, order: TransferOrder) -> TransferReport:
        report = self.receiver.prepare(order)
        return self.receiver.commit(order.epoch, self.model) if report.ok else report

    def check_has(self, report: TransferReport, number: int = 1) -> None:
        assert (report.ok, report.phase, report.readback, report.way) == (True, "done", True, "pull"), report
        assert self.model.digests() == expected(version(number))


def test_every_bit_is_the_trainers_and_is_handed_on(held: Held) -> None:
    late, later = Late(), Late()
    report = late.take(held.order(0, 1))
    late.check_has(report)
    for peer in held.peers:
        peer.end()
    later.check_has(later.take(order_from([report.holder], held.token, version(1))))


def test_a_trainer_that_is_gone_is_asked_first_and_not_for_long(held: Held) -> None:
    late = Late()
    late.check_has(late.take(held.order(0, address=held.trainer)))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_holder_that_dies_or_stops_amid_a_bucket_is_replaced(held: Held, how: str) -> None:
    held.peers[0].ask(fault={"at": "amid", "number": 2, "how": how})
    late = Late()
    late.check_has(late.take(held.order(0, 1)))
    assert held.peers[0].fell(how)


def test_a_holder_that_lies_is_named_and_replaced(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    held.peers[0].ask(fault={"at": "serve", "number": 2, "how": "lie"})
    late = Late()
    with caplog.at_level(logging.WARNING):
        late.check_has(late.take(held.order(0, 1)))
    (said,) = [record.getMessage() for record in caplog.records if "other bytes" in record.getMessage()]
    assert said.startswith(f"{held.at[0]} sent other bytes than the version's: tensor ")


def test_when_all_lie_nothing_is_loaded_and_one_is_named(held: Held) -> None:
    for peer in held.peers:
        peer.ask(fault={"at": "serve", "number": 1, "how": "lie"})
    late = Late()
    before = late.model.digests()
    report = late.take(held.order(0, 1))
    assert (report.ok, report.intact) == (False, True)
    assert report.error.startswith("DigestMismatch: tensor ")
    assert any(f"(from {address})" in report.error for address in held.at)
    assert late.model.digests() == before


def test_a_wait_for_a_holder_that_gets_nothing_itself_ends_at_the_deadline() -> None:
    snapshot, shelf = version(1), Shelf("127.0.0.1")
    shelf.put(Offer("token", lambda: snapshot.manifest, len(snapshot.buckets), snapshot.buckets.__getitem__))
    late = Late()
    before = late.model.digests()
    report = late.take(order_from([shelf.address], "token", snapshot, timeout_s=1.0))
    assert (report.ok, report.intact, report.phase) == (False, True, "receive"), report
    assert report.error.startswith("TransferTimeout: ")
    assert late.model.digests() == before
    shelf.close()


def test_who_does_not_know_the_token_gets_nothing(held: Held) -> None:
    report = Late().take(held.order(0, token="0" * 32))
    assert (report.ok, report.intact) == (False, True)
    assert "not offered here" in report.error


def test_other_weights_under_the_same_number_are_not_taken(held: Held) -> None:
    report = Late().take(held.order(0, digest="f" * 32))
    assert (report.ok, report.intact) == (False, True)
    assert f"{held.at[0]} offers version 1 with other tensors" in report.error


def test_who_takes_a_newer_version_offers_the_old_one_no_more(held: Held) -> None:
    """Its buffers are overwritten. Another one that still has it is asked."""
    with line() as trainer:
        sending = trainer.begin(version(2), [held.peers[0].name])
        assert held.peers[0].update(sending.orders[0]).ok  # type: ignore[union-attr]
        late = Late()
        assert "not offered here" in late.take(held.order(0)).error
        late.check_has(late.take(held.order(0, 1)))


# --- out of the parameters: an engine that keeps no received buckets --------------------------------------------------


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    without_streams(monkeypatch.setattr)
    made = Rank("direct", halves=False)
    assert made.update(version(1)).ok
    yield made
    made.receiver.state.lines.forget()
    made.line.close()


def of(rank: Rank, number: int = 1) -> TransferOrder:
    return order_from([rank.receiver.state.lines.address], rank.token, version(number))


def test_a_version_is_read_back_out_of_the_parameters(direct: Rank) -> None:
    late = Late()
    for number in (1, 2):
        if number > 1:
            assert direct.update(version(number)).ok
        late.check_has(late.take(of(direct, number)), number)


def test_a_bit_that_flipped_in_the_parameters_is_found_by_who_takes_it(direct: Rank) -> None:
    direct.model.tensor("layer.down").view(torch.int16)[3, 7] ^= 1
    report = Late().take(of(direct))
    assert (report.ok, report.intact) == (False, True)
    assert "tensor layer.down: digest" in report.error
    assert f"(from {direct.receiver.state.lines.address})" in report.error


def test_an_engine_that_holds_a_part_of_a_tensor_says_that_it_cannot_hand_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_streams(monkeypatch.setattr)
    made = Rank("direct")
    assert made.update(version(1)).ok
    report = Late().take(of(made))
    assert (report.ok, report.intact) == (False, True)
    assert "layer.down" in report.error
    made.receiver.state.lines.forget()
    made.line.close()


def test_what_was_half_written_is_not_offered(direct: Rank) -> None:
    wrong = [bucket.clone() for bucket in version(2).buckets]
    wrong[-1][0] ^= 1
    report = direct.update(replace(version(2), buckets=tuple(wrong)))
    assert (report.ok, report.intact) == (False, False)
    assert direct.receiver.state.lines.address == ""
    with pytest.raises(WeightSyncError, match="does not hold version"), direct.receiver.lending(2):
        pass


def test_nothing_is_loaded_while_the_parameters_are_looked_at(held: Held) -> None:
    late, order = Late(), held.order(0)
    late.check_has(late.take(order))
    with late.receiver.lending(1) as (manifest, plan):
        assert (manifest, plan is not None) == (version(1).manifest, True)
        report = late.receiver.commit(7, late.model)
        assert (report.ok, report.intact) == (False, True)
        assert "are being looked at" in report.error
        with pytest.raises(WeightSyncError, match="takes part in a transfer itself"), late.receiver.lending(1):
            pass
    with pytest.raises(WeightSyncError, match="does not hold version 2"), late.receiver.lending(2):
        pass
