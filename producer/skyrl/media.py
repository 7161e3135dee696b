"""Images, videos and audio beside a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...messages.errors import InvalidField
from ...messages.model import MediaKind, Medium
from ..data import from_openai, medium

KINDS: Mapping[str, MediaKind] = {"image_data": "image", "video_data": "video", "audio_data": "audio"}


def with_media(form: str, prompt: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job for a prompt with media: ids as they are, or messages, which the worker tokenises.

    data: by image_data, video_data and audio_data: one thing, a list of them, or None. A conversation without places
    for them gets them at the beginning of its last user's message. Raises InvalidField. May block.
    """
    given = {name: value for name, value in data.items() if value is not None}
    media = {name: [medium(KINDS[name], one) for one in _list(value)] for name, value in given.items()}
    found = [one for several in media.values() for one in several]
    if form == "prompt_token_ids":
        return {"token_ids": prompt, "media": tuple(found)}
    if places := [kind for message in prompt for kind in _places(message)]:
        return {"messages": tuple(prompt), "media": tuple(_in_order(places, media))}
    users = [place for place, message in enumerate(prompt) if message.get("role") == "user"]
    if not users:
        raise InvalidField("prompts", prompt, "a message of a user, whose the media are")
    conversation = [dict(message) for message in prompt]
    last = conversation[users[-1]]
    content = last.get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) and content else list(content or ())
    last["content"] = [{"type": one.kind, one.kind: one} for one in found] + text
    messages, ordered = from_openai(conversation)
    return {"messages": messages, "media": ordered}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _places(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else ()
    return [part["type"] for part in parts if isinstance(part, Mapping) and part.get("type") in KINDS.values()]


def _in_order(places: Sequence[str], media: Mapping[str, list[Medium]]) -> list[Medium]:
    waiting = {KINDS[name]: list(several) for name, several in media.items()}
    try:
        return [waiting[kind].pop(0) for kind in places]  # type: ignore[index]
    except (KeyError, IndexError):
        told = {KINDS[name]: len(several) for name, several in media.items()}
        raise InvalidField("prompts", list(places), f"places for as many as there are: {told}") from None
