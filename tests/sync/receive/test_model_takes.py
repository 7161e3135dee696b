"""What a model takes: tied embeddings with the same bits, a head if it is untied, dtypes that lose nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.peers.peers import Line

from rolloutmq.messages import WeightSyncError
from rolloutmq.sync.packing.buckets import fill
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.receive.lend import laid_out
from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.receive.state import CPU
from rolloutmq.sync.tensors.digester import digest
from rolloutmq.sync.transfer.order import TransferReport

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """As SGLang's models load: `skips` a head that is tied, or loads both names into the same parameter.

    derives: the loader computes something, so it cannot be recorded as copies.
    """

    def __init__(self, *, tied: bool, skips: bool = True, derives: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self.skips, self.derives = skips, derives
        self.embed, self.norm = (torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((6, 4), (4,)))
        self.lm_head = torch.nn.Linear(4, 6, bias=False, dtype=dtype)
        if tied:
            self.lm_head.weight = self.embed

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    def load_weights(self, weights: Any) -> None:
        at = {EMBED: self.embed, NORM: self.norm, HEAD: self.lm_head.weight}
        for name, tensor in weights:
            if name != HEAD or not (self.tied and self.skips):
                at[name].data.copy_(tensor * 1 if self.derives else tensor)


def tensors(number: int, dtype: torch.dtype = torch.float32) -> Tensors:
    source = torch.Generator().manual_seed(number)
    shapes = {EMBED: (6, 4), NORM: (4,), HEAD: (6, 4)}
    return {name: torch.randn(shape, generator=source).to(dtype) for name, shape in shapes.items()}


Update = Callable[..., TransferReport]


@pytest.fixture
def updates() -> Iterator[Callable[..., Update]]:
    """Both halves of an update of a model; `stored` is the checkpoint that its engine has loaded, if there is one."""
    line = Line()

    def of(model: Model, stored: Path | str = "") -> Update:
        receiver, versions = Receiver(CPU, model_dir=str(stored)), iter(range(1, 9))

        def update(sent: Tensors, **order: Any) -> TransferReport:
            snapshot = PackedWeights(next(versions), sent, 64).snapshot()
            sending = line.begin(snapshot, ["w"], **order)
            report = receiver.prepare(sending.orders[0])
            if report.ok:
                report = receiver.commit(sending.orders[0].epoch, model)
            line.over(sending)
            return report

        return update

    yield of
    line.close()


def checkpoint(folder: Path, kept: Tensors) -> Path:
    save_file(kept, folder / "model.safetensors")
    return folder


def state(model: Model) -> dict[str, str]:
    return {name: digest(parameter.data) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("derives", [False, True], ids=["plan", "no plan"])
@pytest.mark.parametrize("stored", ["nothing", "without head", "with head"])
def test_a_head_of_a_tied_model_must_be_its_embedding(
    updates: Callable[..., Update], tmp_path: Path, derives: bool, stored: str
) -> None:
    first = tensors(1)
    has = [EMBED, NORM, *([HEAD] if stored == "with head" else [])]
    folder = "" if stored == "nothing" else checkpoint(tmp_path, {name: first[name].clone() for name in has})
    model = Model(tied=True, derives=derives)
    update = updates(model, folder)
    assert update(first | {HEAD: first[EMBED]}).ok
    assert update({EMBED: first[EMBED], NORM: first[NORM]}).ok  # as transformers gives it
    before = state(model)
    for second in (tensors(2), tensors(3)):  # of a layout that is new, and of one that is known
        report = update(second)
        assert (report.ok, report.intact) == (False, True), report
        assert f"tensor {HEAD}: digest {digest(second[HEAD])}" in report.error
        assert f"{EMBED} ({digest(second[EMBED])})" in report.error
        assert state(model) == before
    last = tensors(4)
    assert update(last | {HEAD: last[EMBED]}).ok
    assert torch.equal(model.embed, last[EMBED])


def test_two_names_that_are_loaded_into_one_parameter_must_have_the_same_bits(updates: Callable[..., Update]) -> None:
    model, first = Model(tied=True, skips=False), tensors(1)
    update = updates(model)
    assert update(first | {HEAD: first[EMBED]}).ok
    report = update(tensors(2))
    assert (report.ok, report.intact) == (False, True), report
    assert f"tensor {EMBED}: digest" in report.error
    assert torch.equal(model.embed, first[EMBED])


@pytest.mark.parametrize("derives", [False, True], ids=["plan", "no plan"])
@pytest.mark.parametrize("stored", [False, True], ids=["nothing", "checkpoint"])
def test_an_untied_model_needs_its_head(
    updates: Callable[..., Update], tmp_path: Path, derives: bool, stored: bool
) -> None:
    model, first = Model(tied=False, derives=derives), tensors(1)
    update = updates(model, checkpoint(tmp_path, first) if stored else "")
    report = update({EMBED: first[EMBED], NORM: first[NORM]})
    assert (report.ok, report.intact, report.phase) == (False, True, "load"), report
    assert "missing" in report.error
    assert HEAD in report.error
    assert update(first).ok
    assert torch.equal(model.lm_head.weight, first[HEAD])


def test_an_engine_offers_a_tied_tensor_that_it_holds_under_another_name() -> None:
    second = tensors(2)
    held = {name: second[name] for name in (EMBED, NORM)}
    same = PackedWeights(1, second | {HEAD: second[EMBED]}).snapshot()
    for bucket, inside in zip(same.buckets, laid_out(same.manifest, held), strict=True):
        made = torch.zeros_like(bucket)
        fill(made, inside)
        assert torch.equal(made, bucket)
    with pytest.raises(WeightSyncError, match=f"the engine does not keep {HEAD}"):
        laid_out(PackedWeights(1, second).snapshot().manifest, held)


DTYPES = [
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.float32, True),
    (torch.float32, torch.bfloat16, True),  # who runs the engine in bfloat16 has said so
    (torch.float64, torch.float32, False),
    (torch.float64, torch.bfloat16, False),
    (torch.float32, torch.float16, False),
    (torch.float16, torch.bfloat16, False),
    (torch.bfloat16, torch.float16, False),
    (torch.int8, torch.float32, False),
    (torch.int64, torch.bfloat16, False),
    (torch.bool, torch.float32, False),
    (torch.float8_e4m3fn, torch.bfloat16, False),
]


@pytest.mark.parametrize("derives", [False, True], ids=["plan", "no plan"])
@pytest.mark.parametrize(("sent", "held", "goes"), DTYPES)
def test_a_conversion_that_loses_something_is_refused_by_name(
    updates: Callable[..., Update], sent: torch.dtype, held: torch.dtype, goes: bool, derives: bool
) -> None:
    model = Model(tied=False, derives=derives, dtype=held)
    update = updates(model)
    assert update(tensors(1, held)).ok
    before = state(model)
    given = tensors(2, held) | {NORM: tensors(2)[NORM].to(sent)}
    report = update(given)
    assert report.ok == goes, report
    if goes:
        assert torch.equal(model.norm, given[NORM].to(held))
        return
    names = [str(dtype).removeprefix("torch.") for dtype in (sent, held)]
    assert report.error.startswith(f"DigestMismatch: tensor {NORM}: dtype {names[0]}, the model expects {names[1]}")
    assert (report.intact, state(model)) == (True, before)


def test_a_value_that_becomes_infinite_in_the_engine_is_found(updates: Callable[..., Update]) -> None:
    model = Model(tied=False, dtype=torch.bfloat16)
    update = updates(model)
    large = tensors(1) | {NORM: torch.full((4,), 3.4e38)}  # finite, but above bfloat16's largest value
    report = update(large)
    assert not report.ok
    assert f"tensor {NORM}: has NaN or Inf in it after its conversion" in report.error
    assert update(large, nonfinite="allow").ok
    assert update(tensors(2)).ok


@pytest.mark.parametrize("derives", [False, True], ids=["plan", "no plan"])
def test_what_the_engines_checkpoint_has_is_converted_as_it_was(
    updates: Callable[..., Update], tmp_path: Path, derives: bool
) -> None:
    wide = tensors(1, torch.float64)
    model = Model(tied=False, derives=derives, dtype=torch.float16)
    update = updates(model, checkpoint(tmp_path, wide))
    assert update(wide).ok
    assert torch.equal(model.norm, wide[NORM].half())


def test_a_dtype_that_the_trainer_declares_is_what_is_sent() -> None:
    given = tensors(1, torch.float64) | {"count": torch.arange(3), "scaled": torch.ones(2).to(torch.float8_e4m3fn)}
    snapshot = PackedWeights(1, given, dtype="float16").snapshot()
    found = dict(snapshot.tensors())
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        **dict.fromkeys((EMBED, NORM, HEAD), torch.float16),
        "count": torch.int64,
        "scaled": torch.float8_e4m3fn,
    }
    assert torch.equal(found[NORM], given[NORM].half())
    large = PackedWeights(1, {"w": torch.tensor([1e6])}, dtype="float16").snapshot()
    assert large.nonfinite == ("w",)  # an overflow is found where it happens
