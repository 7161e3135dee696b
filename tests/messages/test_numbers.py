"""Numbers are numbers in every model: no boolean and no text is taken for one, whatever the field."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from rolloutmq.messages import GenerateJob, InvalidField, SamplingParams, decode, encode
from rolloutmq.messages.codec import KINDS
from rolloutmq.messages.model import ACTIONS, DeadLetter, Float, Int
from rolloutmq.ops.operations.catalog import operations
from rolloutmq.sync.transfer import SyncSettings
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.sglang import SGLangConfig

ROOTS: tuple[type, ...] = (
    *KINDS.values(),
    *ACTIONS.values(),
    *(operation.params for operation in operations().values()),
    DeadLetter,
    WorkerConfig,
    SGLangConfig,
    SyncSettings,
)


class Number(NamedTuple):
    """A place for a number in a model. declared: its type with all that is said about it."""

    model: type
    field: str
    declared: Any

    def __str__(self) -> str:
        return f"{self.model.__name__}.{self.field}"


def _in(kind: Any, declared: Any, seen: set[type]) -> Iterator[tuple[type | None, str, Any]]:
    """Numbers in a type: those of models in it by name, the others without."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in {int, float}:
        yield None, "", declared
    elif origin is Annotated:
        yield from _in(inner[0], kind, seen)
    elif origin in {Union, types.UnionType} and bool in inner:
        return  # of free data: True is a boolean there, and a text a text
    elif origin is not None:
        for one in inner:
            yield from _in(one, one, seen)
    elif isinstance(kind, type) and (issubclass(kind, BaseModel) or hasattr(kind, "_fields")) and kind not in seen:
        seen.add(kind)
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if name not in kind.model_fields:
                    continue
                config = kind.model_config.get("strict", False)
            else:
                config = False
            for model, field, found in _in(hint, hint, seen):
                if not config:
                    yield (kind, name, found) if model is None else (model, field, found)


def numbers() -> list[Number]:
    seen: set[type] = set()
    found = {str(one): one for root in ROOTS for place in _in(root, root, seen) if (one := Number(*place))}  # type: ignore[arg-type]
    return list(found.values())


@pytest.mark.parametrize("number", numbers(), ids=str)
def test_neither_a_boolean_nor_a_text_is_a_number(number: Number) -> None:
    adapter = TypeAdapter(number.declared)
    for value in (True, False, np.True_, "1", "0.5", b"1", bytearray(b"1"), [1], {"1": 1}, object()):
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


@pytest.mark.parametrize("number", [one for one in numbers() if issubclass(one.model, BaseModel)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_number_is_finite(number: Number, value: float) -> None:
    with pytest.raises(ValidationError) as refused:
        number.model.model_validate({number.field: value})
    assert number.field in {error["loc"][0] for error in refused.value.errors()}


def test_the_walk_over_the_models_finds_numbers_wherever_they_are() -> None:
    names = {str(number) for number in numbers()}
    assert {
        "SamplingParams.temperature",
        "SamplingParams.logit_bias",
        "SamplingParams.stop_token_sequences",
        "GenerateJob.deadline_s",
        "EmbedJob.dimensions",
        "Segment.version",
        "TensorSpec.shape",
        "WeightAnnouncement.port",
        "StopParams.drain_s",
        "dead-requeue.since",
        "WorkerConfig.lease_s",
        "SGLangConfig.mem_fraction",
    } <= names


def test_numbers_of_numpy_are_numbers() -> None:
    for whole in (np.int32(1), np.uint8(1), np.float32(1.0)):
        assert TypeAdapter(Int).validate_python(whole) == 1
    for number in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert TypeAdapter(Float).validate_python(number) == 0.5
    assert TypeAdapter(Float).validate_python(np.int64(2)) == 2.0


def test_a_thousand_biases_are_decoded_without_a_python_call_for_each() -> None:
    frame = encode(GenerateJob(token_ids=[1], sampling=SamplingParams(logit_bias=dict.fromkeys(range(1000), -0.5))))
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        decode(frame, GenerateJob)
    finally:
        sys.setprofile(None)
    assert len(calls) < 100, calls[-10:]


@pytest.mark.parametrize(
    ("bias", "field"),
    [
        ({1: True}, "1"),
        ({True: 1.0}, "1"),
        ({1: "1"}, "1"),
        ({-1: 1.0}, "-1"),
        ({1: float("nan")}, "1"),
        ({1: 1e5}, "1"),
        ({1: 10**400}, "1"),
    ],
)
def test_a_wrong_bias_is_named_by_its_token(bias: dict[Any, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=rf"^sampling\.logit_bias\.{field}"):
        GenerateJob.build(token_ids=[1], sampling={"logit_bias": {5: 0.5} | bias})


def test_biases_may_be_integers_and_numpys_numbers() -> None:
    given = {1: 2, np.int64(3): np.float32(0.5)}
    assert SamplingParams(logit_bias=given).logit_bias == {1: 2.0, 3: 0.5}
