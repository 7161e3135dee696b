"""A conversation with a model, kept as tokens: what was given, what was generated, and by which weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from redis.exceptions import RedisError

from ...messages.arguments import checks_arguments
from ...messages.errors import InvalidField, RolloutMQError, WaitTimeout
from ...messages.ids import new_id
from ...messages.model import (
    ChatMessage,
    GenerateJob,
    Medium,
    RolloutResult,
    TokenIds,
    TurnFields,
    as_invalid_field,
)
from ..core import ClientCore
from ..inbox import Handle
from .batch import Prompt, prompt_fields
from .stream import Delta, Streams, versions_of

GIVEN = -1
"""The version, and in rows the turn, of a token that no weights sampled."""
SETTLE_S = 10.0
"""Seconds to wait for the outcome of a turn that was cancelled."""


@dataclass(frozen=True, slots=True)
class History:
    """Columns of one length: token_ids: (n,) int32. mask: (n,) uint8. logprobs: (n,) float32. versions: (n,) int64.

    shown: the media in order, each with the start and the end of the given tokens that have its place.
    """

    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    mask: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    shown: tuple[tuple[int, int, Medium], ...] = ()

    @property
    def media(self) -> tuple[Medium, ...]:
        """All media, as `GenerateJob.media` takes them."""
        return tuple(one for _, _, one in self.shown)

    def given(self, ids: npt.NDArray[np.int32], media: Sequence[Medium] = ()) -> History:
        """This history, followed by tokens that were not generated. media: those that have places in them."""
        start, n = len(self.token_ids), len(ids)
        logprobs = np.full(n, np.nan, np.float32)
        after = self._then(ids, np.zeros(n, np.uint8), logprobs, np.full(n, GIVEN, np.int64))
        return replace(after, shown=(*self.shown, *((start, start + n, one) for one in media)))

    def generated(self, result: RolloutResult) -> History:
        """This history, followed by a result."""
        n = len(result.token_ids)
        logprobs = np.full(n, np.nan, np.float32) if result.logprobs is None else result.logprobs
        return self._then(result.token_ids, np.ones(n, np.uint8), logprobs, versions_of(result.segments))

    def upto(self, end: int) -> History:
        """Its first `end` tokens, and their media. Raises InvalidField for an end amid a prompt with media."""
        for start, stop, one in self.shown:
            if start < end < stop:
                raise InvalidField("end", end, f"outside of {start} to {stop}, where the place of an {one.kind} is")
        shown = tuple(each for each in self.shown if each[1] <= end)
        return History(self.token_ids[:end], self.mask[:end], self.logprobs[:end], self.versions[:end], shown)

    def _then(self, *more: npt.NDArray[Any]) -> History:
        mine: tuple[npt.NDArray[Any], ...] = (self.token_ids, self.mask, self.logprobs, self.versions)
        columns = [np.concatenate([one, new]) for one, new in zip(mine, more, strict=True)]
        return replace(History(*columns), shown=self.shown)


_TOKEN_IDS: TypeAdapter[npt.NDArray[np.int32]] = TypeAdapter(TokenIds, config=ConfigDict(arbitrary_types_allowed=True))


def _ids(name: str, value: Any) -> npt.NDArray[np.int32]:
    """Token ids as a job takes them: checked when they are given, not in a later turn. Raises InvalidField."""
    try:
        return _TOKEN_IDS.validate_python(value)
    except ValidationError as error:
        raise InvalidField(name, value, as_invalid_field(error).allowed) from None


def _messages(role: str, content: str) -> tuple[ChatMessage, ...]:
    """One message. Raises InvalidField for a text that is too long."""
    try:
        return (ChatMessage(role=role, content=content),)
    except ValidationError as error:
        raise InvalidField(role, content, as_invalid_field(error).allowed) from None


@checks_arguments()
class Session:
    """A conversation, made by `RolloutClient.session`. It runs one turn at a time; branches run beside each other.

    Only the client has the history. A worker has its prefix in a cache, and the next turn goes to that worker if it is
    there and has room soon. Otherwise another worker reads the history again, which only costs time. A turn that fails
    leaves the history as it was.

    No token is ever decoded and encoded again. A turn's prompt is the history's tokens, followed by what the worker
    made of the new text or messages. Each turn's job has all media so far, so a job's limits are the conversation's.
    Messages need a chat template that renders turns one after the other; another template is refused. A template cannot
    leave out old reasoning here.
    """

    def __init__(
        self,
        core: ClientCore,
        streams: Streams,
        *,
        session_id: str | None = None,
        system: str | None = None,
        token_ids: Sequence[int] | npt.NDArray[Any] | None = None,
        chat: bool = False,
        **fields: Unpack[TurnFields],
    ) -> None:
        if system is not None and token_ids is not None:
            raise InvalidField("system", system, "no system message behind token_ids: put it into them")
        self.session_id = session_id or new_id()
        self.worker: str | None = None
        """The worker that has the history in its cache, as far as is known."""
        self._core, self._streams, self._fields = core, streams, fields
        self._chat = chat or system is not None
        self._opening = () if system is None else _messages("system", system)
        self._history = History().given(_ids("token_ids", () if token_ids is None else token_ids))
        self._turn: str | None = None  # the job under way
        self._branches = itertools.count(1)
        self._closed = False

    # --- what it has -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._history.token_ids)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """(n,) int32: the whole conversation."""
        return self._history.token_ids

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """(n,): 1 where the model generated the token, 0 where it was given: a loss mask."""
        return self._history.mask

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """(n,): as in RolloutResult where generated, else NaN."""
        return self._history.logprobs

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """(n,): of the weights that sampled each token, -1 where it was given."""
        return self._history.versions

    # --- turns -----------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **fields: Unpack[TurnFields]
    ) -> RolloutResult:
        """Generate the next turn. The prompt and what the model generates become part of the history.

        prompt: token ids, a text (of a chat: the user's message), messages, or None to go on from the history.
        fields: those of GenerateJob for this turn, but for n. Raises InvalidField, JobFailed, what `submit` raises, and
        WaitTimeout, all of which leave the history as it was.
        """
        job = self._job(prompt, fields)
        with self._under_way(job), self._core.inbox.reserved(job.id):
            try:
                (result,) = await self._core.wait(await self._core.submit(job), timeout)
            except (WaitTimeout, asyncio.CancelledError):
                await self._give_up(Handle(job.id, job.group, job.n))
                raise
            self._take(job, result)
        return result

    async def stream(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **fields: Unpack[TurnFields]
    ) -> AsyncGenerator[Delta]:
        """Like `generate`, as deltas. The last one puts the turn into the history; leaving earlier cancels the turn."""
        job = self._job(prompt, fields)
        with self._under_way(job):
            done = False
            try:
                async with contextlib.aclosing(self._streams.of(job, timeout)) as deltas:
                    async for delta in deltas:
                        if delta.result is not None:
                            self._take(job, delta.result)
                            done = True
                        yield delta
            finally:
                if not done:
                    with self._core.inbox.reserved(job.id):
                        await self._give_up(Handle(job.id, job.group, job.n))

    def give(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append tokens that nobody generated, such as an observation.

        Raises InvalidField, and RolloutMQError during a turn.
        """
        self._check_idle()
        self._history = self._history.given(_ids("token_ids", token_ids))

    def replace(self, start: int, token_ids: Sequence[int] | npt.NDArray[Any] = ()) -> None:
        """Replace the tokens from `start` on by given ones. Raises InvalidField, and RolloutMQError during a turn."""
        self._check_idle()
        self._history = self._history.upto(self._place("start", start)).given(_ids("token_ids", token_ids))

    def branch(self, at: int | None = None) -> Session:
        """A new session that begins with the first `at` tokens of this one, or with all. Raises InvalidField."""
        self._check_open()
        other = Session(
            self._core,
            self._streams,
            session_id=f"{self.session_id[:100]}.{next(self._branches)}",
            chat=self._chat,
            **self._fields,
        )
        other._history = self._history.upto(len(self) if at is None else self._place("at", at))
        other._opening = self._opening if not len(other) else ()
        other.worker = self.worker
        return other

    async def close(self) -> None:
        """Cancel the turn that is under way, and end the session. Its columns can still be read."""
        self._closed = True
        pause = 0.01
        # A turn may be on its way to the pool, which does not know it yet and has nothing to cancel.
        while (turn := self._turn) is not None and await self._core.cancel([turn]) == ["unknown"]:
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _job(self, prompt: Any, given_fields: TurnFields) -> GenerateJob:
        self._check_idle()
        fields: dict[str, Any] = {"session_id": self.session_id, **self._fields, **given_fields}
        if fields.get("n", 1) != 1:
            raise InvalidField("n", fields["n"], "1: a session is one conversation; branch() for more")
        if self.worker is not None:
            fields.setdefault("prefer_worker", self.worker)
        history = self._history.token_ids
        given = {} if prompt is None else prompt_fields(prompt)
        if self._chat and "text" in given:
            given = {"messages": _messages("user", given["text"])}
        if self._opening and not len(history):
            if "messages" not in given:
                raise InvalidField("prompt", prompt, "messages, or a user's text, behind the system message")
            given = {"messages": (*self._opening, *given["messages"])}
        if not given and not len(history):
            raise InvalidField("prompt", prompt, "something to go on from: the session is empty")
        of_all = fields.pop("media", ()) if "media" in given_fields or not len(history) else ()
        media = (*self._history.media, *(given.pop("media", ()) or of_all))
        if not given or "token_ids" in given:
            given = {"token_ids": np.concatenate([history, _ids("prompt", given.get("token_ids", ()))])}
        elif len(history):
            given["context_ids"] = history
        fields.pop("media", None)
        return GenerateJob.build(**fields | given | ({"media": media} if media else {}))

    async def _give_up(self, turn: Handle) -> None:
        """Cancel a turn, and drop what still comes of it."""
        with contextlib.suppress(RolloutMQError, RedisError, OSError):  # why it is given up is what its caller hears
            await self._core.cancel([turn])
            await self._core.wait(turn, SETTLE_S)

    def _take(self, job: GenerateJob, result: RolloutResult) -> None:
        prompt = job.token_ids if job.token_ids is not None else result.prompt_ids
        known = self._history.token_ids
        if prompt is None or not np.array_equal(prompt[: len(known)], known):
            raise RolloutMQError(f"session {self.session_id}: the worker's prompt does not begin with the history")
        new = job.media[len(self._history.media) :]
        self._history = self._history.given(prompt[len(known) :], new).generated(result)
        self.worker = result.worker_id

    @contextlib.contextmanager
    def _under_way(self, job: GenerateJob) -> Iterator[None]:
        self._turn = job.id
        try:
            yield
        finally:
            self._turn = None

    def _place(self, name: str, value: int) -> int:
        if not 0 <= value <= len(self):
            raise InvalidField(name, value, f"0 to {len(self)}, the tokens there are")
        return value

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutMQError(f"session {self.session_id} is closed")

    def _check_idle(self) -> None:
        self._check_open()
        if self._turn is not None:
            raise RolloutMQError(f"session {self.session_id} has a turn under way: one at a time, or branch()")
