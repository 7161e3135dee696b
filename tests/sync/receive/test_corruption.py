"""What is wrong with a version is found before it serves, whatever it is and wherever it happened, and is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.peers.peer_process import Linear, flip, without_streams
from support.peers.peers import SHAPES, Line, expected, version

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.receive.loading import Loading
from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.receive.state import CPU
from rolloutmq.sync.receive.verify import Arrival
from rolloutmq.sync.tensors.digester import digest
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.tensors.staging import Staging
from rolloutmq.sync.transfer.order import TransferReport

TIMEOUT_S = 10.0


class Model(Linear):
    """As SGLang's do, it ignores names that it does not know. One parameter is of another dtype than what is sent, and
    holds only this rank's half of the columns."""

    HALF = "layer.down"

    def __init__(self) -> None:
        super().__init__(SHAPES, torch.bfloat16, CPU)
        rows, columns = SHAPES[self.HALF]
        half = torch.zeros(rows, columns // 2)
        self.register_parameter(self.HALF.replace(".", "/"), torch.nn.Parameter(half, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == self.HALF:
                held = self.tensor(name)
                held.copy_(tensor[:, : held.shape[1]])
            elif name in self.at:
                super().load_weights([(name, tensor)])


class NoMemory(Staging):
    """As on a GPU that has no room for a second version."""

    def whole(self, sizes: Any) -> None:
        return None


class Rank:
    """A receiver in this process, at the other end of a line.

    way: "pulled", or in a cell, "staged" or "direct". halves: the model has a part of one tensor only; else every
    tensor is there as it was sent.
    """

    def __init__(self, way: str, *, halves: bool = True) -> None:
        self.way, self.staged, self.halves = way, way != "direct", halves
        self.model = Model() if halves else Linear(SHAPES, torch.bfloat16, CPU)
        self.receiver, self.line = Receiver(CPU), Line(cells=way != "pulled")
        if not self.staged:
            self.receiver.state.memory = {CPU: NoMemory(CPU, "on")}

    def update(
        self, snapshot: Snapshot, between: Callable[[Receiver], None] | None = None, **order: Any
    ) -> TransferReport:
        """Both halves. between: what happens between them."""
        sending = self.line.begin(snapshot, ["w"], timeout_s=TIMEOUT_S, **order)
        report = self.receiver.prepare(sending.orders[0])
        if report.ok:
            assert report.phase == ("staged" if self.staged else "ready")
            assert report.way == ("pull" if self.way == "pulled" else "nccl")
            if between is not None:
                between(self.receiver)
            report = self.receiver.commit(sending.orders[0].epoch, self.model)
        self.line.over(sending)
        self.token = sending.outgoing.token
        return report

    def bits(self) -> dict[str, str]:
        return self.model.digests()

    def check_holds(self, snapshot: Snapshot) -> None:
        sent = expected(snapshot)
        if not self.halves:
            assert self.bits() == sent
            return
        whole = dict(snapshot.tensors())[Model.HALF]
        columns = SHAPES[Model.HALF][1] // 2
        assert self.bits() == sent | {Model.HALF: digest(whole[:, :columns].float().contiguous())}


WAYS = [("pulled", True), ("staged", True), ("direct", True), ("direct", False)]


@pytest.fixture(params=WAYS, ids=["pulled", "staged", "direct", "direct whole"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    without_streams(monkeypatch.setattr)
    way, halves = request.param
    made = Rank(way, halves=halves)
    first = version(1)
    assert len(first.buckets) > 2
    report = made.update(first)
    assert (report.ok, report.readback) == (True, True), report
    made.check_holds(first)
    yield made
    made.receiver.state.lines.forget()
    made.line.close()


@pytest.mark.parametrize("rank", [("direct", True)], indirect=True, ids=["direct"])
def test_a_broadcast_that_never_began_leaves_the_weights_as_they_were(rank: Rank) -> None:
    """Another one dies before it is ready. A direct receive must not have begun to load what its buffers had.

    With "drain" it is ready only when it commits."""
    before = rank.bits()
    (cell,) = rank.line.hub._cells._cells
    report = rank.update(version(2), between=lambda _: cell.give_up("another one died"), mode="drain")
    assert (report.ok, report.intact, report.phase) == (False, True, "receive"), report
    assert "another one died" in report.error
    assert rank.bits() == before
    third = version(3)
    assert rank.update(third).ok
    rank.check_holds(third)


def test_a_commit_that_comes_too_late_does_nothing(rank: Rank) -> None:
    """The sender has closed the transfer by then, and may have given its buffers to something else."""
    before = rank.bits()

    def expire(receiver: Receiver) -> None:
        receiver._pending.deadline = 0.0

    report = rank.update(version(2), between=expire)
    assert (report.ok, report.intact) == (False, True), report
    assert "the time for this transfer is over" in report.error
    assert rank.bits() == before


def test_what_is_compared_in_the_parameters_is_not_looked_at_before(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at all of it takes as long as a copy, and a direct receive is loaded before it could be refused."""
    looked: list[int] = []
    original = Arrival.queue

    def look(self: Arrival, bucket: int) -> None:
        looked.append(bucket)
        original(self, bucket)

    monkeypatch.setattr(Arrival, "queue", look)
    snapshot = version(2)
    report = rank.update(snapshot)
    assert (report.ok, report.readback) == (True, True)
    assert looked == ([] if not rank.halves else list(range(len(snapshot.buckets))))


def refused(rank: Rank, report: TransferReport, before: dict[str, str], *names: str) -> None:
    """The report says no and names a tensor; what was staged has left the old weights as they were."""
    assert not report.ok
    assert report.error.startswith("DigestMismatch: ")
    assert any(f"tensor {name}:" in report.error for name in names), report.error
    assert report.intact == rank.staged
    if rank.staged:
        assert report.phase == ("receive" if rank.way == "pulled" else "verify")
        assert rank.bits() == before
    if rank.way == "pulled":
        assert f"(from {rank.line.hub.address})" in report.error


def test_a_flipped_bit_anywhere(rank: Rank) -> None:
    dice, before = random.Random(7), rank.bits()
    for number in range(2, 62):
        honest = version(number)  # of the same one, what is verified would be kept
        spec = dice.choice(honest.manifest.tensors)
        place, bit = spec.offset + dice.randrange(spec.nbytes), dice.randrange(8)
        buckets = [bucket.clone() for bucket in honest.buckets]
        buckets[spec.bucket][place] ^= 1 << bit
        report = rank.update(Snapshot(honest.manifest, tuple(buckets)))
        refused(rank, report, before, spec.name)
    assert rank.update(honest).ok  # and a whole version mends what was half written
    rank.check_holds(honest)


@pytest.mark.parametrize("rank", [("pulled", False)], indirect=True, ids=["pulled"])
def test_what_was_verified_is_not_taken_again(rank: Rank) -> None:
    """The first attempt fails at the last bucket. The second one takes that alone, although now another is wrong."""
    honest, wrong = version(2), []
    for place in (-1, 0):
        buckets = [bucket.clone() for bucket in honest.buckets]
        buckets[place][0] ^= 1
        wrong.append(Snapshot(honest.manifest, tuple(buckets)))
    assert not rank.update(wrong[0]).ok
    sending = rank.line.begin(wrong[1], ["w"])
    assert rank.receiver.prepare(sending.orders[0]).ok
    assert sending.outgoing.offer.sent_bytes == honest.buckets[-1].numel()
    assert rank.receiver.commit(sending.orders[0].epoch, rank.model).ok
    rank.check_holds(honest)


@pytest.mark.parametrize("pair", [("layer.qkv.left", "layer.qkv.right")])
def test_a_swapped_pair(rank: Rank, pair: tuple[str, str]) -> None:
    before, honest = rank.bits(), version(2)
    buckets = [bucket.clone() for bucket in honest.buckets]
    one, other = (next(spec for spec in honest.manifest.tensors if spec.name == name) for name in pair)
    assert one.nbytes == other.nbytes
    first = buckets[one.bucket][one.offset : one.offset + one.nbytes]
    second = buckets[other.bucket][other.offset : other.offset + other.nbytes]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    refused(rank, rank.update(Snapshot(honest.manifest, tuple(buckets))), before, *pair)
    assert rank.update(honest).ok
    rank.check_holds(honest)


@pytest.mark.parametrize("how", ["missing", "extra", "shape"])
def test_not_the_tensors_of_the_model(rank: Rank, how: str) -> None:
    """Found before anything is written, in both ways to receive."""
    before, tensors = rank.bits(), dict(version(2).tensors())
    if how == "missing":
        del tensors["layer.norm"]
    elif how == "extra":
        tensors["layer.bias"] = torch.ones(3)
    else:
        tensors["layer.norm"] = torch.ones(9, dtype=torch.bfloat16)
    report = rank.update(PackedWeights(2, tensors, 512).snapshot())
    assert (report.ok, report.phase, report.intact) == (False, "load", True)
    assert report.error.startswith("DigestMismatch: ")
    assert ("layer.bias" if how == "extra" else "norm") in report.error
    assert rank.bits() == before
    assert rank.update(version(3)).ok
    rank.check_holds(version(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_finite_is_refused_or_allowed(rank: Rank, value: float, place: int) -> None:
    before, tensors = rank.bits(), {name: tensor.clone() for name, tensor in version(2).tensors()}
    tensors["layer.norm"][place] = value
    snapshot = PackedWeights(2, tensors, 512).snapshot()
    assert snapshot.nonfinite == ("layer.norm",)
    refused(rank, rank.update(snapshot), before, "layer.norm")
    assert rank.update(snapshot, nonfinite="allow").ok
    rank.check_holds(snapshot)


@pytest.mark.parametrize("name", SHAPES)
def test_what_changes_after_the_load_is_found_by_reading_back(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = Loading.queue_readback

    def tampered(self: Loading, bucket: int, **how: bool) -> None:
        if name in [each for each, _ in self._by_bucket[bucket]]:
            flip(rank.model.tensor(name).contiguous() if name != Model.HALF else rank.model.tensor(name))
        original(self, bucket, **how)

    monkeypatch.setattr(Loading, "queue_readback", tampered)
    report = rank.update(version(2))
    assert (report.ok, report.intact) == (False, False)
    assert f"tensor {name}: the engine holds" in report.error
    monkeypatch.setattr(Loading, "queue_readback", original)
    assert rank.update(version(3)).ok
    rank.check_holds(version(3))


@pytest.mark.parametrize("rank", [("staged", True), ("pulled", True)], indirect=True, ids=["staged", "pulled"])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != Model.HALF])  # a slice is compared with its source
def test_what_changes_between_the_halves_is_found(rank: Rank, name: str) -> None:
    """In the memory where a verified version waits to be loaded."""
    snapshot = version(2)
    spec = next(spec for spec in snapshot.manifest.tensors if spec.name == name)

    def change(receiver: Receiver) -> None:
        receiver._pending.buckets[spec.bucket][spec.offset + spec.nbytes // 4] ^= 8

    report = rank.update(snapshot, between=change)
    assert (report.ok, report.intact) == (False, False)
    assert f"tensor {name}:" in report.error
    assert rank.update(version(3)).ok
    rank.check_holds(version(3))


def test_without_verification_nothing_is_found(rank: Rank) -> None:
    """So that it is the digests that found it above."""
    honest = version(2)
    buckets = [bucket.clone() for bucket in honest.buckets]
    buckets[0][0] ^= 1
    report = rank.update(Snapshot(honest.manifest, tuple(buckets)), verify=False)
    assert (report.ok, report.readback) == (True, False)
    assert rank.bits()["embed"] != expected(honest)["embed"]
