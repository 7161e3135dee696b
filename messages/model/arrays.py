"""Numeric arrays of any shape as message fields: packed bytes on the wire, numpy views here."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.functional_validators import SkipValidation

DTYPES = ("float32", "float16", "int32", "uint8", "uint16")
"""What may travel; uint16 also holds bfloat16, which numpy does not know, bit by bit."""
MAX_AXES = 4
MAX_BYTES = 16 << 20


def _validate(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, list | tuple) and len(value) == 3 and isinstance(value[2], bytes | bytearray | memoryview):
        dtype, shape, data = value
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
        if not isinstance(shape, list | tuple) or len(shape) > MAX_AXES:
            raise ValueError(f"shape {shape!r}: at most {MAX_AXES} sizes")
        if not all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape):
            raise ValueError(f"shape {shape!r}: sizes from 0 to {MAX_BYTES}")
        wire = np.dtype(dtype).newbyteorder("<")
        if math.prod(shape) * wire.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for {dtype} of shape {tuple(shape)}")
        return np.frombuffer(data, dtype=wire).reshape(shape)
    array = np.array(value)
    if array.dtype.name not in DTYPES:
        raise ValueError(f"dtype {array.dtype.name}: one of {', '.join(DTYPES)}")
    if array.ndim > MAX_AXES or array.nbytes > MAX_BYTES:
        raise ValueError(f"shape {array.shape}: at most {MAX_AXES} axes and {MAX_BYTES} bytes")
    array.setflags(write=False)
    return array


def _serialize(value: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    wire = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return value.dtype.name, value.shape, wire.tobytes()


Packed = Annotated[
    SkipValidation[npt.NDArray[Any]], BeforeValidator(_validate), PlainSerializer(_serialize, return_type=tuple)
]
"""An array of up to four axes and 16 MiB; on the wire (dtype, shape, little-endian bytes in row order)."""
Arrays = Annotated[dict[Annotated[str, Field(min_length=1, max_length=64)], Packed], Field(max_length=16)]
"""Named arrays."""
