"""The base of every message: frozen, strict about names, errors that name field, value and limit."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from pydantic.functional_validators import SkipValidation

from ..errors import InvalidField

MAX_TOKENS = 1 << 20
"""Most token ids or logprobs in one array (4 MiB packed)."""

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
"""What people and programs call things by."""


def _packed(dtype: str, what: str) -> Any:
    """A field that is a 1-D numpy array here, little-endian bytes on the wire: no element becomes a Python object."""
    wire = np.dtype(dtype).newbyteorder("<")

    def validate(value: Any) -> npt.NDArray[Any]:
        if isinstance(value, bytes | bytearray | memoryview):
            if len(value) % wire.itemsize:
                raise ValueError(f"{len(value)} bytes is not a whole number of {what}")
            array = np.frombuffer(value, dtype=wire)
        else:
            raw = np.asarray(value)
            if raw.ndim != 1:
                raise ValueError(f"a one-dimensional array of {what} is required, got {raw.ndim} dimensions")
            if raw.size and raw.dtype.kind not in ("iu" if wire.kind == "i" else "fiu"):
                raise ValueError(f"{what} are {'integers' if wire.kind == 'i' else 'numbers'}, got {raw.dtype}")
            if wire.kind == "i" and raw.size and int(raw.max()) > np.iinfo(np.int32).max:
                raise ValueError(f"{what} fit 32 bits, got {int(raw.max())}")
            array = raw.astype(wire, copy=True)
            array.setflags(write=False)
        if array.size > MAX_TOKENS:
            raise ValueError(f"at most {MAX_TOKENS} {what}, got {array.size}")
        if wire.kind == "i" and array.size and int(array.min()) < 0:
            raise ValueError(f"{what} are not negative, got {int(array.min())}")
        return array

    def serialize(value: npt.NDArray[Any]) -> bytes:
        return value.astype(wire, copy=False).tobytes()

    return (BeforeValidator(validate), PlainSerializer(serialize, return_type=bytes))


_tokens = _packed("i4", "token ids")
_floats = _packed("f4", "float32 values")
TokenIds = Annotated[SkipValidation[npt.NDArray[np.int32]], _tokens[0], _tokens[1]]
"""(n,) int32, non-negative; accepts lists, tuples, arrays and packed little-endian bytes."""
Floats = Annotated[SkipValidation[npt.NDArray[np.float32]], _floats[0], _floats[1]]
"""(n,) float32; accepts lists, tuples, arrays and packed little-endian bytes."""


class Message(BaseModel):
    """Something that travels. Immutable; equal when the wire form is equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="constants")

    KIND: ClassVar[int]
    """The kind byte of the frame (see codec.py); unique, never reused."""

    @classmethod
    def build(cls, /, **fields: Any) -> Self:
        """Construct, raising InvalidField instead of pydantic's ValidationError."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise as_invalid_field(error) from None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash((type(self), repr(self.model_dump())))


def as_invalid_field(error: ValidationError) -> InvalidField:
    """The first complaint of a ValidationError in this package's own words."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or error.title
    more = error.error_count() - 1
    allowed = first["msg"] + (f" (and {more} more)" if more else "")
    return InvalidField(field, first.get("input"), allowed)
