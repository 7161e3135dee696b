"""A version in brief: for receivers that know how it lies."""

from __future__ import annotations

import pytest
import torch
from support.peers.peers import version

from rolloutmq.messages.errors import DigestMismatch
from rolloutmq.messages.model.weights import WeightManifest
from rolloutmq.sync.wire.brief import Brief, layout_name


def manifest(number: int) -> WeightManifest:
    return version(number).manifest


def test_what_is_told_in_brief_is_the_whole() -> None:
    first, second = manifest(1), manifest(2)
    known = Brief.of(first)
    told = known.updated(Brief.of(second).to_bytes())
    assert (told.version, told.outline) == (2, first)
    assert told.manifest() == second
    assert told.manifest() == WeightManifest.model_validate(second.model_dump())
    assert known.manifest() == first


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {"bucket_nbytes": (*m.bucket_nbytes, 1)},
        lambda m: {"tensors": m.tensors[:-1]},
        lambda m: {"tensors": tuple(reversed(m.tensors))},
        *[
            lambda m, name=name, value=value: {
                "tensors": (m.tensors[0].model_copy(update={name: value}), *m.tensors[1:])
            }
            for name, value in [("name", "x"), ("dtype", "int8"), ("shape", (1,)), ("bucket", 1), ("offset", 64)]
        ],
    ],
)
def test_another_layout_is_told_apart(change) -> None:
    first = manifest(1)
    other = first.model_copy(update=change(first))
    assert layout_name(other) != layout_name(first)
    assert Brief.of(first).updated(Brief.of(other).to_bytes()) is None


def test_version_and_digests_are_no_part_of_the_layout() -> None:
    assert layout_name(manifest(1)) == layout_name(manifest(2))
    assert not torch.equal(Brief.of(manifest(1)).digests, Brief.of(manifest(2)).digests)


@pytest.mark.parametrize("cut", [0, 5, 23, -8, -1])
def test_a_torn_brief_is_refused(cut: int) -> None:
    told = Brief.of(manifest(1))
    with pytest.raises(DigestMismatch, match="in brief"):
        told.updated(told.to_bytes()[:cut])


def test_a_trailing_byte_is_refused() -> None:
    told = Brief.of(manifest(1))
    with pytest.raises(DigestMismatch, match="in brief"):
        told.updated(told.to_bytes() + b"\0")
