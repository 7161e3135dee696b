"""Which tensors an engine takes: those of its own checkpoint, all of them and no others."""

from __future__ import annotations

import pytest

from rolloutmq.messages.errors import DigestMismatch
from rolloutmq.sync.receive.compatibility import check_names


def test_tensors_of_another_model_are_named() -> None:
    expected = {"model.a": (2, 3), "model.b": (4,)}
    check_names(expected, expected)
    check_names(expected | {"lm_head.weight": (2, 3)}, expected)  # tied, sent under both names
    check_names(expected, expected | {"lm_head.weight": (2, 3)})
    # A compiled module's names: the engine would log them and keep its old weights.
    with pytest.raises(DigestMismatch, match=r"unknown \['_orig_mod.model.a'.*missing \['model.a'"):
        check_names({"_orig_mod.model.a": (2, 3), "model.b": (4,)}, expected)
    with pytest.raises(DigestMismatch, match=r"missing \['model.b'\]"):
        check_names({"model.a": (2, 3)}, expected)


def test_a_tensor_of_another_shape_is_named() -> None:
    with pytest.raises(DigestMismatch, match=r"tensor b: shape \(5,\), the model's is \(4,\)"):
        check_names({"a": (2,), "b": (5,)}, {"a": (2,), "b": (4,)})
