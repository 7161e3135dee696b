"""What every job has in common: an id under which it may be submitted again."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from ..ids import is_id, new_id
from .base import Message


class Submitted(Message):
    """Gives a job an id where none is given. It has no fields of its own, so that each kind of job keeps their order,
    which is that of the bytes on the wire; a kind declares `id` and `group_id`."""

    @model_validator(mode="before")
    @classmethod
    def _give_it_an_id(cls, data: Any) -> Any:
        # A default would not count as set, and only what is set travels.
        if isinstance(data, dict) and "id" not in data:
            return {**data, "id": new_id()}
        return data

    @field_validator("id", check_fields=False)
    @classmethod
    def _id_has_the_fixed_form(cls, value: str) -> str:
        if not is_id(value):
            raise ValueError("32 lower-case hex digits (rolloutmq.new_id() makes one)")
        return value
