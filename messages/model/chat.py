"""A conversation as it travels: text, placeholders of media, calls of tools and what they answered."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

from .base import Name

MAX_TEXT = 8 << 20
MAX_CALLS = 128
"""Calls of tools in one turn."""
MAX_TOOL_NAME = 128
MediaKind = Literal["image", "video", "audio"]


def _lists(value: Any) -> Any:
    """With lists where the wire has given tuples."""
    if isinstance(value, dict):
        return {name: _lists(one) for name, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_lists)]
"""What JSON could hold; equal before and after it has travelled."""


class TextPart(BaseModel):
    """Text among the parts of a message."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text"] = "text"
    text: str = Field(max_length=MAX_TEXT)


class MediaPart(BaseModel):
    """The place of the job's next medium; the chat template renders the model's own placeholder tokens for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: MediaKind


Part = Annotated[TextPart | MediaPart, Field(discriminator="type")]


def _text_or_parts(value: Any) -> str:
    """Which of the two to check it as, so that an error is about that one and names it."""
    return "parts" if isinstance(value, list | tuple) else "text"


Content = (
    Annotated[
        Annotated[Annotated[str, Field(max_length=MAX_TEXT)], Tag("text")]
        | Annotated[Annotated[tuple[Part, ...], Field(min_length=1, max_length=1024)], Tag("parts")],
        Discriminator(_text_or_parts),
    ]
    | None
)


class FunctionCall(BaseModel):
    """arguments: a JSON object as text, as OpenAI's messages have it, or as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME)
    arguments: str | JsonObject = "{}"

    def rendered(self) -> dict[str, Any]:
        """For a chat template, most of which want the arguments as an object."""
        given = self.arguments
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                given = self.arguments  # what the model wrote, invalid as it may be, is what it is to see again
        return {"name": self.name, "arguments": given}


class ChatToolCall(BaseModel):
    """A call of a tool in an assistant's message."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(default="", max_length=128)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn of a conversation, rendered by the model's chat template on the worker.

    content: text, or parts of which those that are no text stand for the job's media, in order; None only beside
        tool_calls. tool_calls: of an assistant. tool_call_id: which call a tool's message answers. name: of whoever
        speaks, if the template shows it.
    Messages in OpenAI's form, with images in them, become these by `rolloutmq.producer.data.from_openai`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Name
    tool_calls: tuple[ChatToolCall, ...] = Field(default=(), max_length=MAX_CALLS)
    content: Content = Field(default=None, validate_default=True)
    tool_call_id: str | None = Field(default=None, max_length=128)
    name: str | None = Field(default=None, max_length=128)

    @field_validator("content")
    @classmethod
    def _says_something(cls, value: Content, found: ValidationInfo) -> Content:
        if value is None and not found.data.get("tool_calls"):
            raise ValueError("a text or parts are required, except beside tool_calls")
        return value

    @property
    def media(self) -> tuple[MediaKind, ...]:
        """Kinds of the media it has places for, in order."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return tuple(part.type for part in parts if isinstance(part, MediaPart))

    def rendered(self) -> dict[str, Any]:
        """As chat templates take it: plain data, only what is there."""
        content: Any = self.content
        if isinstance(content, tuple):
            content = [part.model_dump() for part in content]
        message: dict[str, Any] = {"role": self.role, "content": "" if content is None else content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.rendered()} for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message
