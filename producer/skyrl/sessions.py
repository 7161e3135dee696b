"""Conversations of several turns: their tokens are kept here, so that losing a worker costs a prefill and no more."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import numpy as np

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob, RolloutResult
from .calls import run_jobs
from .history import Base, History, Turn
from .outputs import output_of, request_id
from .requests import prompts_of, read_batch
from .streaming import StreamingMethods
from .types import InferenceEngineInput, InferenceEngineOutput


class SessionMethods(StreamingMethods):
    """See SkyRLEngine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sessions: dict[str, History] = {}

    def supports_sessions(self) -> bool:
        """True: any worker can continue any session."""
        return True

    async def open_session(self, capacity_of_str_len: int = 8192, session_id: str | None = None) -> str | None:
        """The id of a new session; None if there is one of that id. Nothing of it is on a worker."""
        name = session_id if session_id is not None else f"session-{secrets.token_hex(8)}"
        if not isinstance(name, str) or not name:
            raise InvalidField("session_id", session_id, "a text")
        if name in self._sessions:
            return None
        self._sessions[name] = History(name, capacity_of_str_len)
        return name

    async def close_session(self, session_id: str) -> None:
        """Forget it. Raises InvalidField for one that is not open."""
        self._history(session_id)
        del self._sessions[session_id]

    async def generate_with_session(  # noqa: PLR0917 – SkyRL's signature
        self,
        session_id: str,
        input_batch: InferenceEngineInput,
        rid: str | None = None,
        offset: int | None = None,
        replace: bool = False,
        drop_previous_output: bool = False,
    ) -> InferenceEngineOutput:
        """Generate behind what the session has: the prompt is only what comes new.

        rid: the request to continue, one of an earlier output's `request_ids`; None begins anew. offset: -1 or None:
        behind all of it; 0 or more: behind so many of its tokens, prompt first. replace: what continued that request
        before is forgotten (without rid: the whole session is). drop_previous_output: without what that request
        generated. Several prompts, or n > 1, become as many branches.

        Goes to the worker that has the prefix, if that is there and not too busy. An aborted sample is a request, too,
        and can be continued. Raises InvalidField for an unknown session or request; as `generate` otherwise.
        """
        history = self._history(session_id)
        calls = await self.open_calls()
        with calls.begin() as call:
            await calls.pass_gate(call)
            await self.end_sync()
            texts = await self.ready_texts()
            prompts_of(input_batch)
            base = history.base(rid, offset, replace, drop_previous_output)
            batch = await asyncio.to_thread(read_batch, input_batch, self.sampling_params, texts)
            jobs = [_behind(base, job, session_id) for job in batch.jobs]
            found = await run_jobs(await self.client(), call, jobs, self.timeout_s)
        for job, samples in zip(jobs, found, strict=True):
            for number, sample in enumerate(samples):
                history.add(_turn(job, number, sample, base))
        return await asyncio.to_thread(output_of, jobs, found, batch.wishes, texts)

    async def get_session_info(self, session_id: str) -> dict[str, Any] | None:
        """Its requests, and how many tokens it has; None for one that is not open."""
        history = self._sessions.get(session_id)
        return history.info() if history is not None else None

    async def list_sessions(self) -> list[str]:
        """Ids of the open ones."""
        return list(self._sessions)

    async def fork_session(self, source: str, target: str | None = None, offset: int = -1) -> str | None:
        """The id of a new session that begins with what `source` has; None if there is one of the id `target`.

        offset: -1: all of its requests, under their ids. 0 or more: no request, but so many tokens of the newest one,
        which every first turn (rid=None) continues. Raises InvalidField for a source that is not open.
        """
        history = self._history(source)
        name = target if target is not None else f"session-{secrets.token_hex(8)}"
        if name in self._sessions:
            return None
        self._sessions[name] = history.fork(name, offset)
        return name

    def _history(self, session_id: str) -> History:
        if session_id not in self._sessions:
            raise InvalidField("session_id", session_id, "a session that was opened and not closed")
        return self._sessions[session_id]


def _behind(base: Base, job: GenerateJob, session_id: str) -> GenerateJob:
    """The job, behind what the session has, at the worker that has it."""
    update: dict[str, Any] = {}
    if job.token_ids is None:
        raise InvalidField("image_data", "media beside a conversation", "ids with the model's own placeholders in them")
    if base.tokens:
        update["token_ids"] = np.concatenate([np.asarray(base.tokens, dtype=np.int32), job.token_ids])
    if base.worker_id:
        update["prefer_worker"] = base.worker_id
    if len(session_id) <= 64:
        update["session_id"] = session_id
    return job.model_copy(update=update)


def _turn(job: GenerateJob, number: int, sample: RolloutResult | None, base: Base) -> Turn:
    assert job.token_ids is not None
    return Turn(
        request_id(job.id, number),
        job.token_ids.tolist(),
        sample.token_ids.tolist() if sample is not None else [],
        base.parent,
        sample.worker_id if sample is not None else base.worker_id,
        sample.versions if sample is not None else (),
    )
