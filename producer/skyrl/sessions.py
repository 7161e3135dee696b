"""Conversations of several turns. Their tokens are kept in this process, so the loss of a worker costs one prefill."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob, RolloutResult
from .generation import Generation
from .outputs import InferenceEngineOutput, request_id
from .requests import InferenceEngineInput


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a conversation: `own`, (n,) int32, after those of `before`.

    Requests that continue one another share what they have in common, so a turn costs the memory of its own tokens.
    end: the number of tokens from the start of the conversation.
    """

    own: npt.NDArray[np.int32]
    before: Tokens | None = field(default=None, repr=False)
    end: int = 0

    def then(self, ids: npt.NDArray[np.int32]) -> Tokens:
        """These tokens, followed by `ids`."""
        return Tokens(ids, self, self.end + len(ids))

    def upto(self, end: int) -> Tokens:
        """The first `end` tokens."""
        last: Tokens = self
        while last.before is not None and last.before.end >= end:
            last = last.before
        start = last.end - len(last.own)
        return Tokens(last.own[: end - start], last.before, end)

    def all(self) -> npt.NDArray[np.int32]:
        """(end,) int32: the whole conversation."""
        parts, part = [self.own], self.before
        while part is not None:
            parts.append(part.own)
            part = part.before
        return np.concatenate(parts[::-1])


NOTHING = Tokens(np.empty(0, np.int32))


@dataclass(slots=True)
class SessionRequest:
    """One answered request.

    prompt: all tokens before the generated ones. whole: with the generated ones. parent: the request that it continues,
    None for a first one. versions: the weights versions that sampled it. worker_id: the worker with the prefix in its
    cache.
    """

    rid: str
    prompt: Tokens
    whole: Tokens
    parent: str | None
    worker_id: str = ""
    versions: tuple[int, ...] = ()
    children: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request continues. tokens: all tokens before its own. parent: the request that they belong to."""

    tokens: Tokens = NOTHING
    parent: str | None = None
    worker_id: str = ""


class SessionTree:
    """The requests of one session. Each may continue an earlier one. This class sends nothing.

    capacity: the announced length in characters; nothing depends on it. root: in a forked session, the tokens that
    every first request continues.
    """

    def __init__(self, session_id: str, capacity: int, root: Tokens = NOTHING, worker_id: str = "") -> None:
        self.session_id, self.capacity = session_id, capacity
        self.root, self._root_worker = root, worker_id
        self.requests: dict[str, SessionRequest] = {}

    def prefix(
        self, rid: str | None, offset: int | None = None, replace: bool = False, drop_previous_output: bool = False
    ) -> Prefix:
        """What a request with these parameters continues. With `replace` it forgets the requests after that.

        SkyRLEngine.generate_with_session documents the parameters. Raises InvalidField."""
        if rid is None:
            if offset not in (None, -1) or drop_previous_output:
                raise InvalidField(
                    "rid", rid, "a request of this session, together with offset or drop_previous_output"
                )
            if replace:
                self.requests.clear()
            return Prefix(self.root, None, self._root_worker)
        if rid not in self.requests:
            raise InvalidField("rid", rid, f"one that session {self.session_id!r} has answered and not replaced")
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

    def fork(self, session_id: str, offset: int = -1) -> SessionTree:
        newest = self.newest()
        if offset != -1:
            prefix = self.prefix(newest.rid if newest else None, offset if newest else None)
            if newest is None and not 0 <= offset <= prefix.tokens.end:
                raise InvalidField("offset", offset, f"-1, or from 0 to {prefix.tokens.end}")
            return SessionTree(session_id, self.capacity, prefix.tokens.upto(offset), prefix.worker_id)
        forked = SessionTree(session_id, self.capacity, self.root, self._root_worker)
        for rid, request in self.requests.items():
            forked.requests[rid] = dataclasses.replace(request, children=list(request.children))
        return forked

    def info(self) -> dict[str, Any]:
        """The session as plain data."""
        requests = [
            {
                "rid": request.rid,
                "parent": request.parent,
                "children": list(request.children),
                "prompt_tokens": request.prompt.end,
                "output_tokens": request.whole.end - request.prompt.end,
                "worker_id": request.worker_id,
                "weight_versions": [str(version) for version in request.versions],
            }
            for request in self.requests.values()
        ]
        newest = self.newest()
        return {
            "session_id": self.session_id,
            "capacity_of_str_len": self.capacity,
            "tokens": newest.whole.end if newest else self.root.end,
            "requests": requests,
        }

    def _forget(self, rids: list[str]) -> None:
        """Forget these requests and all that continue them. The list is empty afterwards."""
        while rids:  # no recursion: a conversation may have thousands of turns
            if (request := self.requests.pop(rids.pop(), None)) is not None:
                rids += request.children


class Sessions:
    """The open sessions of one engine. SkyRLEngine documents the methods. trees: session id -> its requests."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.trees: dict[str, SessionTree] = {}

    def open(self, session_id: str | None, capacity: int) -> str | None:
        name = session_id if session_id is not None else _new_name()
        if not isinstance(name, str) or not name:
            raise InvalidField("session_id", session_id, "a text")
        if name in self.trees:
            return None
        self.trees[name] = SessionTree(name, capacity)
        return name

    def tree(self, session_id: str) -> SessionTree:
        """An open session. Raises InvalidField if there is none of that id."""
        if session_id not in self.trees:
            raise InvalidField("session_id", session_id, "a session that was opened and not closed")
        return self.trees[session_id]

    def close(self, session_id: str) -> None:
        del self.trees[self.tree(session_id).session_id]

    def fork(self, source: str, target: str | None, offset: int) -> str | None:
        tree = self.tree(source)
        name = target if target is not None else _new_name()
        if name in self.trees:
            return None
        self.trees[name] = tree.fork(name, offset)
        return name

    async def generate(  # noqa: PLR0917 – SkyRL's signature
        self,
        session_id: str,
        input_batch: InferenceEngineInput,
        rid: str | None,
        offset: int | None,
        replace: bool,
        drop_previous_output: bool,
    ) -> InferenceEngineOutput:
        tree = self.tree(session_id)
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


def _new_name() -> str:
    return f"session-{secrets.token_hex(8)}"


def _prompt(prefix: Prefix, job: GenerateJob) -> Tokens:
    """The session's tokens, followed by the job's own."""
    if job.token_ids is None:
        raise InvalidField("image_data", "media beside a conversation", "ids with the model's own placeholders in them")
    return prefix.tokens.then(job.token_ids)


def _behind(prefix: Prefix, prompt: Tokens, job: GenerateJob, session_id: str) -> GenerateJob:
    """The job with the whole prompt. It prefers the worker that has the session's tokens in its cache."""
    update: dict[str, Any] = {"token_ids": prompt.all()}
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
        sample.versions if sample is not None else (),
    )
