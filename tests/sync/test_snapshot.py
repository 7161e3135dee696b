"""Packing: a copy at once, every tensor back bit for bit, and nothing that does not fit."""

from __future__ import annotations

import pytest
import torch

from rolloutmq.messages import InvalidField, TensorSpec, WeightManifest, decode, encode
from rolloutmq.sync.snapshot import ALIGN, PackedWeights, unpack

TENSORS = {
    "bf16": torch.randn(5, 3).to(torch.bfloat16),
    "fp32": torch.randn(7),
    "int8": torch.arange(-5, 6, dtype=torch.int8),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
    "turned": torch.randn(4, 6).t(),
    "strided": torch.randn(10, 10)[::3, ::2],
    "fp64": torch.randn(3, dtype=torch.float64),
    "yes": torch.tensor([True, False, True]),
    "fp8": torch.randn(6).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_every_tensor_comes_back(bucket_bytes: int) -> None:
    snapshot = PackedWeights(3, TENSORS.items(), bucket_bytes).snapshot()
    manifest = decode(encode(snapshot.manifest), WeightManifest)
    assert manifest.version == 3
    assert [bucket.numel() for bucket in snapshot.buckets] == list(manifest.bucket_nbytes)
    assert len(snapshot.buckets) == {1: len(TENSORS), 1 << 20: 1}.get(bucket_bytes, len(snapshot.buckets))
    found = {spec.name: tensor for spec, tensor in unpack(manifest, list(snapshot.buckets))}
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))
    assert all(spec.offset % ALIGN == 0 for spec in manifest.tensors)


def test_training_may_go_on_at_once() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    packed = PackedWeights(1, [("w", weight)])
    with torch.no_grad():
        weight.fill_(9)
    snapshot = packed.snapshot()
    ((_, tensor),) = unpack(snapshot.manifest, list(snapshot.buckets))
    assert torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "every name once"),
        ([("a", [1.0])], "dense torch tensors"),
        ([("a", torch.ones(2, 2).to_sparse())], "dense torch tensors"),
        ([("a", torch.ones(2, device="meta"))], "dense torch tensors"),
        ([], "at least one"),
    ],
)
def test_what_cannot_be_packed(tensors: list, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        PackedWeights(1, tensors)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "load"},
        {"dtype": "Tensor"},
        {"dtype": "float31"},
        {"shape": (5,)},
        {"bucket": 1},
        {"offset": 64},
        {"offset": 1},
        {"nbytes": 17},
        {"shape": (1 << 40, 1 << 40)},
    ],
)
def test_a_manifest_that_does_not_fit_its_buckets(wrong: dict) -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=(4,), bucket=0, offset=0, nbytes=16, digest="0" * 16)
    bucket = torch.zeros(64, dtype=torch.uint8)
    manifest = WeightManifest(version=1, bucket_nbytes=(64,), tensors=(spec.model_copy(update=wrong),))
    with pytest.raises(InvalidField, match="w"):
        list(unpack(manifest, [bucket]))
