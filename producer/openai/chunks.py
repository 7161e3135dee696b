"""The chunks of an OpenAI stream, while a request is generated."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...messages.model import RolloutResult, join_segments
from ..calls import Delta
from .logprobs import Decode, TokenBytes
from .request import Request
from .response import ending, prompt_fields, response_id, stop_place, text_of, token_fields, usage, weight_versions

_INCOMPLETE = "\ufffd"
WINDOW = 16
"""How many tokens are decoded again with every piece. A character or a word's leading space depends on fewer."""
OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}


class GrowingText:
    """The text of a sample whose ids come in pieces. A character is shown when all of its tokens are there.

    text: all text shown so far. It only grows.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window_text = ""  # the shown text of the ids from `_window` on
        self._window = 0
        self.text = ""

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that `ids` add. last: no ids follow, so incomplete characters are shown as they are."""
        self._ids += ids
        found = self._decode(self._ids[self._window :])
        if not last:
            found = found.rstrip(_INCOMPLETE)
        if not found.startswith(self._window_text):  # the tokenizer reads the text differently now: wait for more ids
            return ""
        delta = found[len(self._window_text) :]
        self.text += delta
        self._window_text = found
        if len(self._ids) - self._window > 2 * WINDOW:
            self._move()
        return delta

    def _move(self) -> None:
        """Drop the oldest ids of the window, if the rest decodes to the same end of the text."""
        window = len(self._ids) - WINDOW
        shorter = self._decode(self._ids[window:]).rstrip(_INCOMPLETE)
        if shorter and self._window_text.endswith(shorter):
            self._window, self._window_text = window, shorter


class Chunks:
    """The chunks of one answer, made from the deltas of its jobs' samples.

    The server writes each as `data: <chunk as JSON>`, and `data: [DONE]` at the end.
    """

    def __init__(self, request: Request, decode: Decode | None = None, token_bytes: TokenBytes | None = None) -> None:
        """decode, token_bytes: see `response`. Deltas of text jobs have their text already."""
        self._request, self._decode, self._token_bytes = request, decode, token_bytes
        self._place = {job.id: place * job.n for place, job in enumerate(request.jobs)}
        self._prompts: dict[int, list[int]] = {}  # ids that no chunk of a choice has had yet
        for place, job in enumerate(request.jobs):
            if job.token_ids is not None:
                ids = job.token_ids.tolist()
                self._prompts |= {place * job.n + number: ids for number in range(job.n)}
        self._versions: dict[int, list[int]] = {}  # the oldest and the newest so far, of each choice
        self._texts: dict[int, GrowingText] = {}
        self._held: dict[int, str] = {}  # text that may be the beginning of a stop
        self._chars: dict[int, int] = {}
        self._unsent: dict[int, Delta] = {}  # tokens whose text cannot be shown yet
        self._results: dict[str, dict[int, RolloutResult]] = {job.id: {} for job in request.jobs}
        self._created = int(time.time())

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a chat, one with the role for each choice. A completion has none."""
        if self._request.kind != "chat":
            return []
        count = sum(job.n for job in self._request.jobs)
        return [self._chunk(self._delta_choice(i, {"role": "assistant", "content": ""})) for i in range(count)]

    def of(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of one delta; the last one of a sample has its finish_reason.

        An answer that may turn out to be tool calls is shown only when it is whole. A delta without visible text (half
        a character, a special token) is sent with the next one, so the chunks have every token's log-probability and
        version. If a sample was begun again, its choice has "restarted": true, and its earlier chunks are void.
        """
        request = self._request
        index = self._place[delta.job_id] + delta.sample
        if delta.restarted:
            for kept in (self._texts, self._held, self._chars, self._unsent, self._versions):
                kept.pop(index, None)
        text = self._text(index, delta)
        calls: list[dict[str, Any]] = []
        self._note(index, delta)
        if request.tools.parsed:
            if delta.result is None:
                return []
            whole, calls = request.tools.calls(delta.result, text_of(request, delta.result, self._decode))
            text = whole or ""
        elif (unsent := self._unsent.pop(index, None)) is not None:
            delta = _joined(unsent, delta)
        if delta.result is None and not text and not request.token_ids:
            self._unsent[index] = delta
            return []
        choice = self._content(index, text, delta, calls)
        if delta.result is not None:
            self._results[delta.job_id][delta.sample] = delta.result
            choice |= ending(request, delta.result, bool(calls))
        return [self._chunk(choice)]

    def closing(self) -> list[dict[str, Any]]:
        """The last chunk, with the usage if the request asked for it."""
        if not self._request.include_usage:
            return []
        found = [list(self._results[job.id].values()) for job in self._request.jobs]
        return [self._chunk() | {"usage": usage(self._request.jobs, found)}]

    def _note(self, index: int, delta: Delta) -> None:
        """What later chunks say of these tokens, beside their own choice."""
        if seen := [*self._versions.get(index, ()), *(segment.version for segment in delta.segments)]:
            self._versions[index] = [min(seen), max(seen)]
        result = delta.result
        if result is not None and result.text is not None and result.prompt_ids is not None:
            self._prompts[index] = result.prompt_ids.tolist()  # a worker made them

    def _text(self, index: int, delta: Delta) -> str:
        if delta.text is not None or self._decode is None:
            text = delta.text or ""
        else:
            growing = self._texts.setdefault(index, GrowingText(self._decode))
            text = growing.add(delta.token_ids.tolist(), last=delta.result is not None)
        if not self._request.stops:
            return text
        text = self._held.pop(index, "") + text
        if delta.result is not None:
            return text[: stop_place(self._request, delta.result, text)]
        safe = without_stop(text, self._request.stops)
        self._held[index] = text[safe:]
        return text[:safe]

    def _content(self, index: int, text: str, delta: Delta, calls: list[dict[str, Any]]) -> dict[str, Any]:
        request = self._request
        if request.kind == "chat":
            content: dict[str, Any] = {"content": text} if text or not calls else {}
            content |= request.tools.shown([{"index": number, **call} for number, call in enumerate(calls)])
            choice = self._delta_choice(index, content)
        else:
            choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        whole = delta.result if request.tools.parsed else None  # no token of it was sent before
        source, start = (whole, 0) if whole is not None else (delta, delta.start)
        offset = self._chars.get(index, 0)
        choice |= token_fields(request, source, self._decode, self._token_bytes, start=start, offset=offset)
        self._chars[index] = offset + len(text)
        if delta.restarted:
            choice["restarted"] = True
        return choice

    def _delta_choice(self, index: int, content: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": content, "finish_reason": None, "logprobs": None}

    def _chunk(self, choice: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {
            "id": response_id(self._request),
            "object": OBJECTS[self._request.kind],
            "created": self._created,
            "model": self._request.model,
            "choices": [] if choice is None else [choice],
            **weight_versions([version for both in self._versions.values() for version in both]),
        }
        if choice is not None and (ids := self._prompts.pop(choice["index"], None)) is not None:
            choice |= prompt_fields(self._request, ids)
            chunk |= {"prompt_token_ids": ids} if self._request.token_ids else {}
        return chunk


def without_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters of a text come before any stop, and before an end of it that may become one."""
    safe = len(text)
    for stop in stops:
        if (place := text.find(stop)) >= 0:
            safe = min(safe, place)
        else:
            starts = range(max(0, len(text) - len(stop) + 1), len(text))
            safe = min(safe, next((start for start in starts if stop.startswith(text[start:])), safe))
    return safe


def _joined(first: Delta, then: Delta) -> Delta:
    """The tokens of two deltas of a sample that follow each other."""
    logprobs = [one.logprobs for one in (first, then) if one.logprobs is not None]
    return replace(
        then,
        start=first.start,
        token_ids=np.concatenate([first.token_ids, then.token_ids]),
        logprobs=np.concatenate(logprobs) if logprobs else None,
        segments=tuple(join_segments([*first.segments, *then.segments])),
        token_arrays={
            name: np.concatenate([one.token_arrays[name] for one in (first, then) if name in one.token_arrays])
            for name in first.token_arrays | then.token_arrays
        },
        restarted=first.restarted,
    )


async def stream_chunks(
    request: Request,
    deltas: AsyncIterator[Delta],
    decode: Decode | None = None,
    token_bytes: TokenBytes | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """All chunks of an answer. deltas: those of all samples of its jobs, in any order. The rest is as in `response`."""
    chunks = Chunks(request, decode, token_bytes)
    for chunk in chunks.opening():
        yield chunk
    async for delta in deltas:
        for chunk in chunks.of(delta):
            yield chunk
    for chunk in chunks.closing():
        yield chunk
