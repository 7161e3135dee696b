"""Packing: a copy at once, every tensor back bit for bit, and nothing that does not fit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rolloutmq.messages import ConfigError, InvalidField, TensorSpec, WeightManifest, decode, encode
from rolloutmq.sync.packing import buckets, packing
from rolloutmq.sync.packing.gather import strip_wrappers
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.tensors.digester import digest
from rolloutmq.sync.tensors.places import ALIGN, Place
from rolloutmq.sync.tensors.snapshot import Snapshot, unpack

SIGNALLING_NAN = torch.tensor([0x7FA00001, 1], dtype=torch.int32).view(torch.float32)
MAPPED = torch.frombuffer(bytearray(range(64)), dtype=torch.bfloat16, offset=2)
"""As files in memory may have it: starts two bytes off any boundary."""
TENSORS = {
    "bf16": torch.randn(5, 3).to(torch.bfloat16),
    "fp16": torch.randn(5, 4).to(torch.float16),
    "fp32": torch.randn(7),
    "int8": torch.arange(-5, 6, dtype=torch.int8),
    "int64": torch.arange(3) << 40,
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
    "turned": torch.randn(4, 6).t(),
    "strided": torch.randn(10, 10)[::3, ::2],
    "shifted": torch.randn(9).to(torch.bfloat16)[1:],
    "mapped": MAPPED[:8],
    "mapped, shifted": MAPPED[3:11],
    "broadcast": torch.randn(3, 1).expand(3, 4),
    "fp64": torch.randn(3, dtype=torch.float64),
    "yes": torch.tensor([True, False, True]),
    "fp8": torch.randn(6).to(torch.float8_e4m3fn),
    "fp8 turned": torch.randn(2, 3).to(torch.float8_e5m2).t(),
    "nan": SIGNALLING_NAN,
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(4, dtype=torch.complex128).conj().imag,
    "complex128": torch.randn(2, 2, dtype=torch.complex128).t(),
}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, in row-major order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def check_same(snapshot: Snapshot, tensors: dict[str, torch.Tensor]) -> None:
    found = dict(snapshot.tensors())
    assert sorted(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(raw(found[name]), raw(tensor)), name
    for spec in snapshot.manifest.tensors:
        assert spec.digest == digest(raw(tensors[spec.name])), spec.name


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_every_tensor_comes_back(bucket_bytes: int) -> None:
    snapshot = PackedWeights(3, TENSORS.items(), bucket_bytes).snapshot()
    manifest = decode(encode(snapshot.manifest), WeightManifest)
    assert manifest == snapshot.manifest
    assert manifest.version == 3
    assert [bucket.numel() for bucket in snapshot.buckets] == list(manifest.bucket_nbytes)
    full = sum(1 for tensor in TENSORS.values() if tensor.numel())
    assert len(snapshot.buckets) == {1: full, 1 << 20: 1}.get(bucket_bytes, len(snapshot.buckets))
    assert all(spec.offset % ALIGN == 0 for spec in manifest.tensors)
    check_same(snapshot, TENSORS)
    assert snapshot.device == torch.device("cpu")


def test_a_tensor_larger_than_a_bucket_has_one_for_itself() -> None:
    tensors = {"a": torch.ones(8), "large": torch.ones(1000), "b": torch.ones(8), "c": torch.ones(8)}
    manifest = PackedWeights(1, tensors.items(), 256).snapshot().manifest
    assert [(spec.name, spec.bucket) for spec in manifest.tensors] == [("large", 0), ("b", 1), ("c", 1), ("a", 2)]
    assert manifest.bucket_nbytes == (4032, 128, 64)


def test_the_gaps_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was in the memory before: buckets of equal weights are equal."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **how: empty(*args, **how).fill_(0x77))
    snapshot = PackedWeights(1, TENSORS.items(), 300).snapshot()
    rest = [bucket.clone() for bucket in snapshot.buckets]
    assert any(bucket.any() for bucket in rest)
    for spec in snapshot.manifest.tensors:
        rest[spec.bucket][spec.offset : spec.offset + spec.nbytes] = 0
    assert not any(bucket.any() for bucket in rest)


def test_training_may_go_on_at_once() -> None:
    weight = nn.Parameter(torch.ones(4))
    packed = PackedWeights(1, [("w", weight)])
    with torch.no_grad():
        weight.fill_(9)
    ((_, tensor),) = packed.snapshot().tensors()
    assert torch.equal(tensor, torch.ones(4))
    assert not tensor.requires_grad


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        packed = PackedWeights(1, [("w", torch.arange(4.0)), ("v", torch.randn(4, 4).t())])
        snapshot = packed.snapshot()
    assert not any(bucket.is_inference() for bucket in snapshot.buckets)
    assert torch.equal(dict(snapshot.tensors())["w"], torch.arange(4.0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(4)


def test_tied_parameters_under_both_names() -> None:
    model = Tied()
    once = PackedWeights(1, model.named_parameters()).snapshot()
    assert [spec.name for spec in once.manifest.tensors] == ["embed.weight", "norm.weight", "norm.bias"]
    both = PackedWeights(1, model.named_parameters(remove_duplicate=False)).snapshot()
    digests = {spec.name: spec.digest for spec in both.manifest.tensors}
    assert digests["embed.weight"] == digests["head.weight"]
    check_same(both, dict(model.state_dict()))


def test_a_mapping_will_do() -> None:
    model = Tied()
    check_same(PackedWeights(1, model.state_dict()).snapshot(), dict(model.state_dict()))


def test_renamed_and_dropped() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "_orig_mod.0.weight"

    def rename(name: str) -> str | None:
        name = strip_wrappers(name)
        return None if name.endswith("bias") else f"model.{name}"

    snapshot = PackedWeights(1, model.named_parameters(), rename=rename).snapshot()
    assert [spec.name for spec in snapshot.manifest.tensors] == ["model.0.weight", "model.1.weight"]
    assert torch.equal(dict(snapshot.tensors())["model.1.weight"], model.get_parameter("_orig_mod.1.weight"))
    with pytest.raises(InvalidField, match=r"'one'.*every name once"):
        PackedWeights(1, model.named_parameters(), rename=lambda name: "one")
    with pytest.raises(InvalidField, match="at least one"):
        PackedWeights(1, model.named_parameters(), rename=lambda name: None)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("model.layers.0.mlp.weight", "model.layers.0.mlp.weight"),
        ("module.model.norm", "model.norm"),
        ("module._orig_mod.norm", "norm"),
        ("_orig_mod.module.norm", "norm"),
        ("model.layers.0._orig_mod._checkpoint_wrapped_module.up", "model.layers.0.up"),
        ("layers.module.weight", "layers.module.weight"),
        ("module", "module"),
    ],
)
def test_names_without_wrappers(name: str, without: str) -> None:
    assert strip_wrappers(name) == without


def test_nan_and_inf_are_told_not_judged() -> None:
    tensors = {
        "good": torch.ones(3),
        "nan": torch.tensor([1.0, float("nan")]),
        "ids": torch.tensor([1, 2]),
        "inf": torch.tensor([[float("inf"), 0.0]]).to(torch.bfloat16),
    }
    assert PackedWeights(1, tensors.items(), 64).snapshot().nonfinite == ("nan", "inf")
    assert PackedWeights(1, [("good", tensors["good"])]).snapshot().nonfinite == ()


def test_the_next_version_has_the_places_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first = PackedWeights(1, TENSORS.items(), 300)
    changed = {name: tensor.clone() for name, tensor in TENSORS.items()}
    changed["fp32"] += 1
    with monkeypatch.context() as patch:
        patch.setattr(packing.PlacePlanner, "_new", lambda *_: pytest.fail("worked out again"))
        second = PackedWeights(2, changed.items(), 300, like=first.places)
    assert second.places is first.places
    check_same(second.snapshot(), changed)
    check_same(first.snapshot(), TENSORS)


def _shorter(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["complex128"]


def _longer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["one more"] = torch.ones(5)


def _reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fp32"] = torch.randn(80)


def _as_another_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fp32"] = tensors["fp32"].double()


@pytest.mark.parametrize("change", [_shorter, _longer, _reshaped, _as_another_type])
def test_what_is_not_like_the_last_is_placed_afresh(change: Any) -> None:
    first = PackedWeights(1, TENSORS.items(), 300)
    changed = dict(TENSORS)
    change(changed)
    second = PackedWeights(2, changed.items(), 300, like=first.places)
    assert second.places == PackedWeights(2, changed.items(), 300).places != first.places
    check_same(second.snapshot(), changed)
    with pytest.raises(InvalidField, match=r"'bf16'.*every name once"):
        PackedWeights(2, [*changed.items(), ("bf16", torch.ones(1))], 300, like=first.places)
    assert PackedWeights(2, TENSORS.items(), 100, like=first.places).places.bucket_bytes == 100


class Attributed(nn.Parameter):
    """As serving engines have them: a parameter with attributes."""


class Living(torch.Tensor):
    """Its memory is not what its shape says, as with quantized tensors."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_subclass_without_a_life_of_its_own() -> None:
    weight = Attributed(torch.arange(4.0))
    check_same(PackedWeights(1, [("w", weight)]).snapshot(), {"w": weight.detach()})


FLAT = nn.Parameter(torch.ones(3))
FLAT._is_flat_param = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "every name once"),
        ([("a", [1.0])], r"tensors\[a\].*dense torch tensors"),
        ([("a", torch.ones(2, 2).to_sparse())], r"tensors\[a\].*sparse_coo.*dense torch tensors"),
        ([("a", torch.ones(2, device="meta"))], r"tensors\[a\].*meta.*dense torch tensors"),
        ([("a", torch.empty(2, dtype=torch.bits8))], r"tensors\[a\]\.dtype"),
        ([("a", torch.ones(2).as_subclass(Living))], r"tensors\[a\].*Living.*plain tensors or DTensors"),
        ([("a", nn.UninitializedParameter())], r"tensors\[a\].*UninitializedParameter"),
        ([("a", FLAT)], r"tensors\[a\].*FSDP1"),
        ([("_fsdp_wrapped_module.a", torch.ones(3))], "FSDP1"),
        ([("", torch.ones(1))], "names of 1 to 512"),
        ([("n" * 513, torch.ones(1))], "names of 1 to 512"),
        ([(7, torch.ones(1))], "names of 1 to 512"),
        ([("a", torch.ones([1] * 17))], r"tensors\[a\]\.ndim"),
        ([], "at least one"),
    ],
)
def test_what_cannot_be_packed(tensors: list, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        PackedWeights(1, tensors)


@pytest.mark.parametrize("settings", [{"bucket_bytes": 0}, {"bucket_bytes": True}, {"keep": "disk"}])
def test_wrong_settings(settings: dict) -> None:
    with pytest.raises(InvalidField, match=next(iter(settings))):
        PackedWeights(1, TENSORS.items(), **settings)


def test_without_the_lead_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "fill", lambda *_: pytest.fail("copied"))
    packed = PackedWeights(1, TENSORS.items(), leader=False)
    assert packed.buckets == ()
    with pytest.raises(ConfigError, match="leader"):
        packed.snapshot()
    with pytest.raises(InvalidField, match="every name once"):
        PackedWeights(1, [("a", torch.ones(1))] * 2, leader=False)


def test_a_stream_of_temporary_tensors_is_never_there_as_a_whole() -> None:
    """A trainer that makes its tensors one by one: at most a bucket of them waits, and one is being made."""
    living: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for index in range(20):
            made = torch.full((64,), float(index))
            living.add(made)
            most = max(most, len(living))
            yield f"t{index}", made
            del made

    snapshot = PackedWeights(1, stream(), bucket_bytes=3 * 256).snapshot()
    assert len(snapshot.buckets) == 7
    assert 3 <= most <= 4
    assert [int(tensor[0]) for _, tensor in snapshot.tensors()] == list(range(20))
    living.clear()
    most = 0
    PackedWeights(1, stream(), leader=False)
    assert most == 1


SPEC = TensorSpec(name="w", dtype="float32", shape=(4,), bucket=0, offset=0, nbytes=16, digest="0" * 16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "load"},
        {"dtype": "Tensor"},
        {"dtype": "float31"},
        {"dtype": "qint8"},
        {"shape": (5,)},
        {"bucket": 1},
        {"bucket": 1 << 70},
        {"offset": 64},
        {"offset": 1},
        {"offset": 1 << 70},
        {"nbytes": 17},
        {"nbytes": 1 << 70, "shape": (1 << 68,)},
        {"shape": (1 << 40, 1 << 40)},
        {"shape": (0, 1 << 40, 1 << 40), "nbytes": 0},
        {"shape": (0, 1 << 64), "nbytes": 0},
    ],
)
def test_a_manifest_that_does_not_fit_its_buckets(wrong: dict) -> None:
    bucket = torch.zeros(64, dtype=torch.uint8)
    manifest = WeightManifest(version=1, bucket_nbytes=(64,), tensors=(SPEC.model_copy(update=wrong),))
    with pytest.raises(InvalidField, match=r"^w"):
        list(unpack(manifest, [bucket]))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({}, "every name once"),
        ({"name": "v"}, "after the last byte of w"),
        ({"name": "v", "offset": 12}, "after the last byte of w"),
        ({"name": "v", "bucket": 2}, "below 2, the number of buckets"),
    ],
)
def test_a_manifest_that_contradicts_itself(second: dict, said: str) -> None:
    buckets = [torch.zeros(64, dtype=torch.uint8)] * 2
    manifest = WeightManifest(version=1, bucket_nbytes=(64, 64), tensors=(SPEC, SPEC.model_copy(update=second)))
    with pytest.raises(InvalidField, match=said):
        next(unpack(manifest, buckets))  # before the first tensor is given


def test_tensors_side_by_side_and_empty_ones_anywhere() -> None:
    others = [{"name": "v", "offset": 16}, {"name": "u", "bucket": 1}, {"name": "e", "shape": (0,), "nbytes": 0}]
    tensors = (SPEC, *(SPEC.model_copy(update=other) for other in others))
    manifest = WeightManifest(version=1, bucket_nbytes=(64, 16), tensors=tensors)
    buckets = [torch.arange(64, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)]
    found = {spec.name: tensor for spec, tensor in unpack(manifest, buckets)}
    assert raw(found["v"]).tolist() == list(range(16, 32))
    assert found["e"].shape == (0,)


@pytest.mark.parametrize("sizes", [(64,), (64, 63), (63, 64), (64, 64, 64), (1 << 61, 1 << 62)])
def test_other_buckets_than_the_manifest_has(sizes: tuple[int, ...]) -> None:
    buckets = [torch.zeros(64, dtype=torch.uint8)] * 2
    manifest = WeightManifest(version=1, bucket_nbytes=sizes, tensors=(SPEC,))
    with pytest.raises(InvalidField, match="bucket_nbytes"):
        list(unpack(manifest, buckets))


def test_a_place_is_a_view() -> None:
    bucket = torch.zeros(128, dtype=torch.uint8)
    Place("w", torch.float32, (2, 2), 0, 64, 16).view(bucket).fill_(1)
    assert bucket.nonzero().flatten().tolist() == [66, 67, 70, 71, 74, 75, 78, 79]


@pytest.mark.parametrize("bucket_bytes", [1, 512, 1 << 20])
def test_the_smallest_bucket_comes_last(bucket_bytes: int) -> None:
    """Whatever is done with it is done while nothing is on the wire any more."""
    packed = PackedWeights(1, TENSORS, bucket_bytes)
    snapshot = packed.snapshot()
    sizes = snapshot.manifest.bucket_nbytes
    assert list(sizes) == sorted(packed.places.sizes, reverse=True)
    assert [spec.bucket for spec in snapshot.manifest.tensors] == sorted(s.bucket for s in snapshot.manifest.tensors)
    check_same(snapshot, TENSORS)
