"""The methods of SkyRLEngine for conversations. Their tokens are kept here: losing a worker costs one prefill."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob, Medium, RolloutResult
from .generation import Generation
from .outputs import InferenceEngineOutput, request_id
from .requests import InferenceEngineInput


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a conversation: `own`, (n,) int32, after those of `before`.

    Requests that continue one another share what they have in common, so a turn costs the memory of its own tokens.
    end: the number of tokens from the start of the conversation. media: those that have places in `own`.
    """

    own: npt.NDArray[np.int32]
    before: Tokens | None = field(default=None, repr=False)
    end: int = 0
    media: tuple[Medium, ...] = ()

    def then(self, ids: npt.NDArray[np.int32], media: tuple[Medium, ...] = ()) -> Tokens:
        """These tokens, followed by `ids`."""
        return Tokens(ids, self, self.end + len(ids), media)

    def upto(self, end: int) -> Tokens:
        """The first `end` tokens. Raises InvalidField for an end amid a prompt with media."""
        last: Tokens = self
        while last.before is not None and last.before.end >= end:
            last = last.before
        start = last.end - len(last.own)
        if last.media and start < end < last.end:
            raise InvalidField("offset", end, f"outside of {start} to {last.end}, where the places of media are")
        return Tokens(last.own[: end - start], last.before, end, last.media if end == last.end else ())

    def all(self) -> npt.NDArray[np.int32]:
        """(end,) int32: the whole conversation."""
        return np.concatenate([part.own for part in self._parts()])

    def all_media(self) -> tuple[Medium, ...]:
        """Of the whole conversation, in the order of their places."""
        return tuple(one for part in self._parts() for one in part.media)

    def _parts(self) -> list[Tokens]:
        parts = [self]
        while (before := parts[-1].before) is not None:
            parts.append(before)
        return parts[::-1]


NOTHING = Tokens(np.empty(0, np.int32))


@dataclass(slots=True)
class SessionRequest:
    """One answered request.

    prompt: all tokens before the generated ones. whole: with the generated ones. parent: the request that it continues,
    None for a first one. worker_id: the worker with the prefix in its cache.
    """

    rid: str
    prompt: Tokens
    whole: Tokens
    parent: str | None
    worker_id: str = ""
    children: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request continues. tokens: all tokens before its own. parent: the request that they belong to."""

    tokens: Tokens = NOTHING
    parent: str | None = None
    worker_id: str = ""


class SessionTree:
    """The requests of one session. Each may continue an earlier one. This class sends nothing.

    root: in a forked session, the tokens that every first request continues.
    """

    def __init__(self, root: Tokens = NOTHING, worker_id: str = "") -> None:
        self.root, self._root_worker = root, worker_id
        self.requests: dict[str, SessionRequest] = {}

    def prefix(
        self, rid: str | None, offset: int | None = None, replace: bool = False, drop_previous_output: bool = False
    ) -> Prefix:
        """What a request with these parameters continues. With `replace` it forgets the requests after that.

        `generate_with_session` documents the parameters. Raises InvalidField."""
        if rid is None:
            if offset not in (None, -1) or drop_previous_output:
                raise InvalidField(
                    "rid", rid, "a request of this session, together with offset or drop_previous_output"
                )
            if replace:
                self.requests.clear()
            return Prefix(self.root, None, self._root_worker)
        if rid not in self.requests:
            raise InvalidField("rid", rid, "one that this session has answered and not replaced")
        request = self.requests[rid]
        tokens = request.prompt if drop_previous_output else request.whole
        if offset is not None and offset != -1:
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= tokens.end:
                raise InvalidField("offset", offset, f"-1, or from 0 to {tokens.end}, the tokens of request {rid}")
            tokens = tokens.upto(offset)
        if replace:
            self._forget(request.children)
        return Prefix(tokens, rid, request.worker_id)

    def add(self, request: SessionRequest) -> None:
        """Add an answered request. If its parent was replaced meanwhile, it is kept without a parent."""
        parent = self.requests.get(request.parent or "")
        if parent is not None:
            parent.children.append(request.rid)
        else:
            request.parent = None
        self.requests[request.rid] = request

    def newest(self) -> SessionRequest | None:
        """The request that was answered last, None if there is none."""
        return next(reversed(self.requests.values()), None)

    def fork(self, offset: int = -1) -> SessionTree:
        """A copy; see `fork_session`."""
        newest = self.newest()
        if offset != -1:
            prefix = self.prefix(newest.rid if newest else None, offset if newest else None)
            if newest is None and not 0 <= offset <= prefix.tokens.end:
                raise InvalidField("offset", offset, f"-1, or from 0 to {prefix.tokens.end}")
            return SessionTree(prefix.tokens.upto(offset), prefix.worker_id)
        forked = SessionTree(self.root, self._root_worker)
        for rid, request in self.requests.items():
            forked.requests[rid] = dataclasses.replace(request, children=list(request.children))
        return forked

    def _forget(self, rids: list[str]) -> None:
        """Forget these requests and all that continue them. The list is empty afterwards."""
        while rids:  # no recursion: a conversation may have thousands of turns
            if (request := self.requests.pop(rids.pop(), None)) is not None:
                rids += request.children


class Sessions:
    """Base of SkyRLEngine, which has the parts that these methods call. _sessions: session id -> its requests."""

    _generation: Generation
    _sessions: dict[str, SessionTree]

    async def open_session(self, session_id: str | None = None, capacity: int | None = None) -> str | None:
        """The id of a new session, None if that id is in use. A session is kept here, not on a worker, and grows as it
        has to: `capacity` limits nothing."""
        return self._add_session(session_id, SessionTree())

    async def close_session(self, session_id: str) -> None:
        """Forget a session. Raises InvalidField if it is not open."""
        self._session(session_id)
        del self._sessions[session_id]

    async def fork_session(self, source: str, target: str | None = None, offset: int = -1) -> str | None:
        """The id of a new session that begins as a copy of `source`. None if the id `target` is in use.
        offset: -1 copies all requests, under their ids. 0 or more copies so many tokens of the newest request, and
        every first turn (rid=None) continues them. Raises InvalidField if `source` is not open."""
        return self._add_session(target, self._session(source).fork(offset))

    async def generate_with_session(  # noqa: PLR0917 – SkyRL's signature
        self,
        session_id: str,
        input_batch: InferenceEngineInput,
        rid: str | None = None,
        offset: int | None = None,
        replace: bool = False,
        drop_previous_output: bool = False,
    ) -> InferenceEngineOutput:
        """Continue a session. The prompt has only the new tokens.
        rid: the request to continue, from an earlier output's `request_ids`. None begins anew. offset: keep only so
        many of that request's tokens, prompt first; -1 or None keeps all. replace: forget the requests that continued
        it before; without rid, forget the whole session. drop_previous_output: leave out that request's output.
        Several prompts, or n > 1, become branches. Raises InvalidField for an unknown session or request, otherwise as
        `generate`."""
        tree = self._session(session_id)
        async with self._generation.begin() as call:
            batch = await self._generation.read(input_batch)
            prefix = tree.prefix(rid, offset, replace, drop_previous_output)
            prompts = [_prompt(prefix, job) for job in batch.jobs]
            jobs = [_behind(prefix, *one, session_id) for one in zip(prompts, batch.jobs, strict=True)]
            batch = dataclasses.replace(batch, jobs=jobs)
            found = await call.run(batch.jobs)
        for job, prompt, samples in zip(batch.jobs, prompts, found, strict=True):
            for number, sample in enumerate(samples):
                tree.add(_answered(job, number, sample, prompt, prefix))
        return await self._generation.output(batch, found)

    def _session(self, session_id: str) -> SessionTree:
        """An open session. Raises InvalidField if there is none of that id."""
        if session_id not in self._sessions:
            raise InvalidField("session_id", session_id, "a session that was opened and not closed")
        return self._sessions[session_id]

    def _add_session(self, session_id: str | None, tree: SessionTree) -> str | None:
        name = session_id if session_id is not None else f"session-{secrets.token_hex(8)}"
        if not isinstance(name, str) or not name:
            raise InvalidField("session_id", session_id, "a text")
        if name in self._sessions:
            return None
        self._sessions[name] = tree
        return name


def _prompt(prefix: Prefix, job: GenerateJob) -> Tokens:
    """The session's tokens, followed by the job's own."""
    if job.token_ids is None:
        raise InvalidField("image_data", "media beside a conversation", "ids with the model's own placeholders in them")
    return prefix.tokens.then(job.token_ids, job.media)


def _behind(prefix: Prefix, prompt: Tokens, job: GenerateJob, session_id: str) -> GenerateJob:
    """The job with the whole prompt. It prefers the worker that has the session's tokens in its cache."""
    update: dict[str, Any] = {"token_ids": prompt.all(), "media": prompt.all_media()}
    if prefix.worker_id:
        update["prefer_worker"] = prefix.worker_id
    if len(session_id) <= 64:
        update["session_id"] = session_id
    return job.model_copy(update=update)


def _answered(
    job: GenerateJob, number: int, sample: RolloutResult | None, prompt: Tokens, prefix: Prefix
) -> SessionRequest:
    return SessionRequest(
        request_id(job.id, number),
        prompt,
        prompt.then(sample.token_ids) if sample is not None else prompt,
        prefix.parent,
        sample.worker_id if sample is not None else prefix.worker_id,
    )
