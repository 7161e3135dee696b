"""An entry of a journal as a line for people, and as plain data for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from pydantic import BaseModel

from ...messages.errors import MessageError
from ...messages.journal import Entry
from ...messages.model import GenerateJob, Message, RolloutResult

LONGEST = 60
"""Characters of a value in a line."""
FEW = 12
"""Items of a list in a line."""


def clock(at: float) -> str:
    """UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def as_line(entry: Entry) -> str:
    """Time, kind, job, and what matters most of it."""
    sample = f".{entry.sample}" if entry.sample >= 0 else ""
    return f"{clock(entry.at)}  {entry.event:12} {entry.job_id}{sample}  {_told(entry)}".rstrip()


def content(entry: Entry) -> tuple[Message | None, str]:
    """The message of an entry, or None and why there is none: it was redacted, is damaged, or of a newer version."""
    try:
        message = entry.message
    except MessageError as error:
        return None, f"its content cannot be read: {error}"
    return message, "" if message is not None else "written without its content"


def _told(entry: Entry) -> str:
    message, problem = content(entry)
    if message is None and entry.event in ("job", "result", "announcement"):
        return problem
    if isinstance(message, RolloutResult):
        versions = ", ".join(f"{tokens} of version {version}" for version, tokens in message.segments)
        return f"{len(message.token_ids)} tokens ({versions}), {message.finish_reason}, attempt {message.attempt}"
    if isinstance(message, GenerateJob):
        return f"{prompt_of(message)}, n={message.n}, at most {message.sampling.max_new_tokens} new tokens"
    if entry.event == "failure":
        return f"{entry.data.get('outcome')}: {entry.data.get('cause')}"
    return noted(entry.data)


def prompt_of(job: GenerateJob) -> str:
    """What a job begins with."""
    return "a text" if job.token_ids is None else f"{len(job.token_ids)} tokens"


def noted(data: Mapping[str, Any]) -> str:
    """The data of an entry, each value cut off where it is long."""
    return ", ".join(f"{name}={_short(value)}" for name, value in data.items())


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list) and len(value) > FEW:
        return f"[{len(value):,} values]"
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def as_data(entry: Entry) -> dict[str, Any]:
    """Everything in it, for JSON; what says nothing is left out."""
    told: dict[str, Any] = {"event": entry.event, "at": entry.at}
    names = ("job_id", "client_id", "group_id", "sample", "attempt")
    told |= {name: value for name in names if (value := getattr(entry, name)) not in ("", -1)}
    if entry.versions:
        told["versions"] = list(entry.versions)
    message, problem = content(entry)
    if message is not None:
        told["message"] = plain(message)
    elif entry.content is not None:
        told["unreadable"] = problem
    return told | ({"data": plain(dict(entry.data))} if entry.data else {})


def plain(value: Any) -> Any:
    """Data that JSON has words for: arrays as lists, NaN and infinity as None, bytes as their number."""
    if isinstance(value, BaseModel):
        given = {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
        return {name: plain(inner) for name, inner in given.items() if inner is not None}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no word for it
    return f"{len(value)} bytes" if isinstance(value, bytes) else value
