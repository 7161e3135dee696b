"""Arrays as message fields: what goes out comes back, and what is no array is refused before memory is taken for it."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.specimens.messages import specimens

from rolloutmq.messages import (
    GenerateJob,
    InvalidField,
    LogprobOptions,
    Partial,
    RolloutResult,
    SamplingParams,
    Segment,
    decode,
    encode,
)
from rolloutmq.messages.model.base import ARRAY_DTYPES, MAX_ARRAY_BYTES

SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)
ARRAYS = st.sampled_from(ARRAY_DTYPES).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), SHAPES))


def result(**fields: Any) -> RolloutResult:
    return specimens()["wide-result"].model_copy(update=fields)  # type: ignore[return-value]


@given(array=ARRAYS)
def test_an_array_arrives_bit_by_bit(array: np.ndarray[Any, Any]) -> None:
    there = decode(encode(result(arrays={"a": array})), RolloutResult).arrays["a"]
    assert there.dtype.name == array.dtype.name
    assert there.shape == array.shape
    assert there.tobytes() == array.tobytes()


def test_what_was_decoded_is_a_view_that_nobody_can_change() -> None:
    there = decode(encode(result()), RolloutResult).token_arrays["top_ids"]
    with pytest.raises(ValueError, match="read-only"):
        there[0] = 1


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (("float64", (1,), bytes(8)), "dtype 'float64'"),
        (("object", (1,), bytes(8)), "dtype 'object'"),
        (("float32", (2,), bytes(4)), "4 bytes for float32"),
        (("float32", (-1,), bytes(4)), "sizes from 0"),
        (("float32", (1 << 40, 0), b""), f"sizes from 0 to {MAX_ARRAY_BYTES}"),
        (("float32", (1, 1, 1, 1, 1), bytes(4)), "at most 4 sizes"),
        (("float32", (True,), bytes(4)), "sizes from 0"),
        (("float32", "1", bytes(4)), "sizes"),
        (("float32", (1,)), "inhomogeneous"),
        ({"a": 1}, "dtype"),
    ],
)
def test_what_is_no_array_is_refused_by_name(wire: Any, says: str) -> None:
    good = encode(result())
    fields = msgpack.unpackb(good[3:], strict_map_key=False)
    fields["arrays"] = {"a": wire}
    with pytest.raises(InvalidField, match=says) as refused:
        decode(good[:3] + msgpack.packb(fields), RolloutResult)
    assert refused.value.field.startswith("arrays.a")


@pytest.mark.parametrize(
    "options",
    [LogprobOptions(token_ids=tuple(range(1024))), LogprobOptions(top=64, prompt=True)],
    ids=["token_ids", "top"],
)
def test_logprobs_that_no_result_could_hold_are_refused_with_the_job(options: LogprobOptions) -> None:
    for tokens, fits in ((12_000, True), (110_000, False)):
        fields: dict[str, Any] = {
            "token_ids": [1] * tokens,
            "sampling": SamplingParams(max_new_tokens=tokens),
            "logprobs": options,
        }
        if fits:
            GenerateJob.build(**fields)
            continue
        with pytest.raises(InvalidField, match=rf"bytes for each of up to \d+ tokens.* {MAX_ARRAY_BYTES} bytes"):
            GenerateJob.build(**fields)


def test_rows_are_as_many_as_tokens() -> None:
    with pytest.raises(InvalidField, match=r"token_arrays\['top_ids'\] has shape \(3, 1\) for 2 tokens"):
        Partial.build(
            token_ids=[1, 2],
            logprobs=[-1.0, -1.0],
            segments=(Segment(1, 2),),
            token_arrays={"top_ids": np.zeros((3, 1), np.int32)},
        )
