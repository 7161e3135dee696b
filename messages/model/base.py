"""The base of every message: frozen, strict about names, errors that name field, value and limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.functional_validators import SkipValidation
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..errors import InvalidField, shortly
from ..ids import is_id, new_id
from ..nearest import instead_of

MAX_TOKENS = 1 << 20
"""Most token ids or logprobs in one array (4 MiB packed)."""

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
"""A name that people and programs give to something."""
T = TypeVar("T")
Items = Annotated[tuple[T, ...], Field(fail_fast=True)]
"""An array whose validation ends at the first wrong element. A hundred thousand errors would take seconds."""


_NO_NUMBERS = bool | np.bool_ | str | bytes
"""What pydantic would turn into a number."""


def _whole(value: Any) -> Any:
    if type(value) is not int and isinstance(value, _NO_NUMBERS):
        raise ValueError(f"an integer, not {type(value).__name__}")
    return value


def _number(value: Any) -> Any:
    if type(value) is not float and isinstance(value, _NO_NUMBERS):
        raise ValueError(f"a number, not {type(value).__name__}")
    return value


Int = Annotated[int, BeforeValidator(_whole)]
"""An integer, Python's or numpy's. Booleans and texts are refused. Messages that only our own code makes use StrictInt,
which is faster."""
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
"""A finite number, Python's or numpy's. Booleans and texts are refused. Every field for a number is one of Int,
StrictInt and Float: plain `int` and `float` take True for 1, and "0.5" for 0.5."""

MAX_METADATA_ITEMS = 64


def _few(value: Any) -> Any:
    # Here, because pydantic counts a dict's items when it has validated all of them.
    if isinstance(value, Mapping) and len(value) > MAX_METADATA_ITEMS:
        raise ValueError(f"at most {MAX_METADATA_ITEMS} items, got {len(value)}")
    return value


Metadata = Annotated[dict[str, str | int | float | bool | None], BeforeValidator(_few)]
"""Items that the caller attaches to a job, at most 64. Its results carry them too."""

MAX_DEPTH = 64
"""The deepest nesting of free data, because both sides walk through it recursively."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value with lists in place of tuples, so it is equal before and after a trip over the wire.

    Raises ValueError for what no message can hold: JSON allows integers of any size, halves of characters and endless
    nesting; Python allows anything.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{value[:80]!r} has half a character") from None
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError("an integer over 64 bits")
    elif isinstance(value, dict | list | tuple):
        if depth >= MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if not isinstance(value, dict):
            return [plain(one, depth + 1) for one in value]
        if odd := {type(key).__name__ for key in value if not isinstance(key, str)}:
            raise ValueError(f"keys of type {min(odd)}, not text")
        return {plain(key): plain(one, depth + 1) for key, one in value.items()}
    elif value is not None and not isinstance(value, float | bytes):
        raise ValueError(f"{type(value).__name__} is no plain data")
    return value


PlainObject = Annotated[dict[str, Any], BeforeValidator(plain)]
"""Free data under names: texts, numbers, booleans, bytes, None, and lists and maps of these, at most MAX_DEPTH deep."""


def _packed(dtype: str, what: str) -> Any:
    """A field that is a 1-D numpy array in Python and little-endian bytes on the wire.

    No element becomes a Python object.
    """
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
"""(n,) int32, non-negative. Accepts lists, tuples, arrays and packed little-endian bytes."""
Floats = Annotated[SkipValidation[npt.NDArray[np.float32]], _floats[0], _floats[1]]
"""(n,) float32. Accepts lists, tuples, arrays and packed little-endian bytes."""


class Record(BaseModel):
    """A part of a message: immutable, and strict about the names of its fields.

    The error for an unknown name says where the name belongs, if a part of the record has such a field. Otherwise it
    says which names are nearest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {}
    """Names that are no fields but that people try, each with what to write instead."""

    def __init__(self, /, **fields: Any) -> None:
        try:
            self.__pydantic_validator__.validate_python(fields, self_instance=self)
        except ValidationError as error:
            raise self._with_right_words(error) from None

    # So marked, pydantic takes it for its own and does not call it for what it decodes, which would take longer.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def _with_right_words(cls, error: ValidationError) -> ValidationError:
        """The errors about unknown names, with what to write instead. If there are none, `error` itself."""
        told: list[InitErrorDetails] = []
        for one in error.errors(include_url=False):
            kind = _record_at(cls, one["loc"][:-1]) if one["type"] == "extra_forbidden" else None
            if kind is not None:
                words = {"instead": kind._instead_of(str(one["loc"][-1]), one["input"])}
                kept = PydanticCustomError("extra_forbidden", "{instead}", words)
                told.append(InitErrorDetails(type=kept, loc=one["loc"], input=one["input"]))
        return ValidationError.from_exception_data(error.title, told) if told else error

    @classmethod
    def _instead_of(cls, name: str, value: object) -> str:
        """Text that says what to write instead of a field that `cls` does not have."""
        if name in cls.OTHER_WORDS:
            return cls.OTHER_WORDS[name]
        defaults = {field: type(info.default) for field, info in cls.model_fields.items()}
        parts = {field: kind for field, kind in defaults.items() if issubclass(kind, Record)}
        return instead_of(name, value, f"{cls.__name__} has no such field", cls.model_fields, parts)


def _record_at(kind: Any, path: Sequence[int | str]) -> type[Record] | None:
    """The record at a place in a record of this kind. None if that cannot be told."""
    for name in path:
        if isinstance(name, str):
            kind = kind and name in kind.model_fields and _record_in(kind.model_fields[name].annotation)
    return kind or None


def _record_in(annotation: Any) -> type[Record] | None:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    return next(filter(None, map(_record_in, get_args(annotation))), None)


class Message(Record):
    """A message between trainers, workers and operators. Two are equal when their wire forms are equal."""

    model_config = ConfigDict(arbitrary_types_allowed=True, ser_json_inf_nan="constants")

    KIND: ClassVar[int]
    """The kind byte of the frame, see codec.py. It is unique and never reused."""

    @classmethod
    def build(cls, /, **fields: Any) -> Self:
        """Construct the message. Raises InvalidField instead of pydantic's ValidationError."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise as_invalid_field(error) from None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash((type(self), repr(self.model_dump())))


def as_invalid_field(error: ValidationError) -> InvalidField:
    """The first error of a ValidationError as an InvalidField."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or error.title
    more = error.error_count() - 1
    allowed = first["msg"] + (f" (and {more} more)" if more else "")
    return InvalidField(field, first.get("input"), allowed)


ARRAY_DTYPES = ("float32", "float16", "int32", "uint8", "uint16")
"""The dtypes that a message can hold. numpy has no bfloat16, so uint16 holds its bits."""
MAX_AXES = 4
MAX_ARRAY_BYTES = 48 << 20
"""Most bytes of an array, and of all arrays of a result together. The rest of its frame holds ids and text."""


def _read_array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, list | tuple) and len(value) == 3 and isinstance(value[2], bytes | bytearray | memoryview):
        dtype, shape, data = value
        if dtype not in ARRAY_DTYPES:
            raise ValueError(f"dtype {shortly(dtype)}: one of {', '.join(ARRAY_DTYPES)}")
        if not isinstance(shape, list | tuple) or len(shape) > MAX_AXES:
            raise ValueError(f"shape {shortly(shape)}: at most {MAX_AXES} sizes")
        if not all(type(size) is int and 0 <= size <= MAX_ARRAY_BYTES for size in shape):
            raise ValueError(f"shape {shortly(shape)}: sizes from 0 to {MAX_ARRAY_BYTES}")
        wire = np.dtype(dtype).newbyteorder("<")
        if math.prod(shape) * wire.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for {dtype} of shape {tuple(shape)}")
        return np.frombuffer(data, dtype=wire).reshape(shape)
    array = np.array(value)
    if array.dtype.name not in ARRAY_DTYPES:
        raise ValueError(f"dtype {array.dtype.name}: one of {', '.join(ARRAY_DTYPES)}")
    if array.ndim > MAX_AXES or array.nbytes > MAX_ARRAY_BYTES:
        raise ValueError(f"shape {array.shape}: at most {MAX_AXES} axes and {MAX_ARRAY_BYTES} bytes")
    array.setflags(write=False)
    return array


def _packed_array(value: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    wire = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return value.dtype.name, value.shape, wire.tobytes()


Packed = Annotated[
    SkipValidation[npt.NDArray[Any]], BeforeValidator(_read_array), PlainSerializer(_packed_array, return_type=tuple)
]
"""An array of up to four axes and 48 MiB. On the wire it is (dtype, shape, little-endian bytes in row order)."""
Arrays = Annotated[dict[Annotated[str, Field(min_length=1, max_length=64)], Packed], Field(max_length=16)]
"""Named arrays."""


def too_large(sizes: Iterable[tuple[str, int, int]]) -> str:
    """What to say about arrays that do not fit into a result, "" if they do. sizes: (what, bytes of a row, rows)."""
    sizes = [size for size in sizes if size[1]]
    if sum(width * rows for _, width, rows in sizes) <= MAX_ARRAY_BYTES:
        return ""
    told = ", ".join(f"{name}: {width} bytes for each of up to {rows} tokens" for name, width, rows in sizes)
    return f"{told}; the arrays of a result may have {MAX_ARRAY_BYTES} bytes"


def exactly_one(message: Message, *names: str) -> None:
    """Raises ValueError unless exactly one of these fields is set."""
    given = [name for name in names if getattr(message, name) is not None]
    if len(given) != 1:
        allowed = f"{', '.join(names[:-1])} and {names[-1]}"
        raise ValueError(f"exactly one of {allowed} is required, got {given or 'none'}")


class Submitted(Message):
    """Base of all jobs. It gives a job an id if the caller gives none.

    It has no fields of its own. Each kind of job declares all of its fields, `id` and `group_id` among them, because
    their order is the order of the bytes on the wire.
    """

    @model_validator(mode="before")
    @classmethod
    def _give_it_an_id(cls, data: Any) -> Any:
        # A default does not count as set, and only set fields travel.
        if isinstance(data, dict) and "id" not in data:
            return {**data, "id": new_id()}
        return data

    @field_validator("id", check_fields=False)
    @classmethod
    def _id_has_the_fixed_form(cls, value: str) -> str:
        if not is_id(value):
            raise ValueError("32 lower-case hex digits (rolloutmq.new_id() makes one)")
        return value
