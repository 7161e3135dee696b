"""The messages of a conversation: text, placeholders for media, tool calls and their answers."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from .base import Items, Name, PlainObject, Record

MAX_TEXT = 8 << 20
"""Most bytes of a text in UTF-8. The models count characters; the codec counts the bytes before a message is sent."""
MAX_CALLS = 128
"""The most tool calls in one turn."""
MAX_TOOL_NAME = 128
MediaKind = Literal["image", "video", "audio"]


class TextPart(Record):
    """A text among the parts of a message."""

    type: Literal["text"] = "text"
    text: str = Field(max_length=MAX_TEXT)


class MediaPart(Record):
    """The place of the job's next medium. The chat template renders the model's own placeholder tokens there."""

    type: MediaKind


Part = Annotated[TextPart | MediaPart, Field(discriminator="type")]


def _text_or_parts(value: Any) -> str:
    """The form to check the content as, so an error names only that form."""
    return "parts" if isinstance(value, list | tuple) else "text"


Content = (
    Annotated[
        Annotated[Annotated[str, Field(max_length=MAX_TEXT)], Tag("text")]
        | Annotated[Annotated[Items[Part], Field(min_length=1, max_length=1024)], Tag("parts")],
        Discriminator(_text_or_parts),
    ]
    | None
)


class FunctionCall(Record):
    """arguments: a JSON object, either as text (OpenAI's form) or as a mapping."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME)
    arguments: str | PlainObject = "{}"

    def rendered(self) -> dict[str, Any]:
        """The call for a chat template. Most templates want the arguments as an object."""
        given = self.arguments
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                given = self.arguments  # the model must see again what it wrote, even if that is invalid
        return {"name": self.name, "arguments": given}


class ChatToolCall(Record):
    """A tool call in an assistant's message."""

    id: str = Field(default="", max_length=128)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Record):
    """One turn of a conversation. The worker renders it with the model's chat template.

    content: a text, or parts. The parts that are no text stand for the job's media, in order. None is allowed only
        beside tool_calls.
    tool_calls: the calls of an assistant's turn. tool_call_id: the call that a tool's message answers.
    name: the speaker's name, for templates that show it.
    `rolloutmq.producer.data.from_openai` makes these from messages in OpenAI's form with images in them.
    """

    role: Name
    tool_calls: Items[ChatToolCall] = Field(default=(), max_length=MAX_CALLS)
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
        """The kinds of media that the message has places for, in order."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return tuple(part.type for part in parts if isinstance(part, MediaPart))

    def rendered(self) -> dict[str, Any]:
        """The message for a chat template: plain data, without fields that are not set."""
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
