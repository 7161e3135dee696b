"""The methods of a client that stream a job, generate a batch, and open a session."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...messages.model import GenerateJob, SamplingParams
from ..inbox import Group, JobHandle
from .batch import generate
from .delta import Delta
from .prompts import Prompt, as_jobs
from .session import Session

if TYPE_CHECKING:
    from ..client import RolloutClient


class StreamCalls:
    """For a RolloutClient."""

    def _itself(self) -> RolloutClient:
        return cast("RolloutClient", self)

    async def stream(
        self, job: GenerateJob | JobHandle | None = None, /, *, timeout: float | None = None, **fields: Any
    ) -> AsyncGenerator[Delta]:
        """What a job generates, while it does: its samples' tokens in pieces, each sample's last one with its result.

        A job is submitted (as by `submit`, but for its `stream`, which is on); of a handle, what is there comes first.
        Other calls of this client do not hand out its outcomes meanwhile. Coming back acknowledges like `results`.
        Raises what `submit` raises, and JobFailed, or WaitTimeout if nothing comes for `timeout` s: nothing is lost
        then, stream the handle again.
        """
        client = self._itself()
        await client.open()
        if isinstance(job, JobHandle):
            handle = job
            deltas = client._streams.of(handle.job_id, lambda: _submitted(handle), timeout)
        else:
            whole = job.model_copy(update={"stream": True}) if job else GenerateJob.build(**fields | {"stream": True})
            deltas = client._streams.of(whole.id, lambda: client.submit(whole), timeout)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        n: int = 1,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Group]:
        """`n` samples of each prompt: a Group for each, in the order of the prompts.

        prompts: token ids, a text, or messages each, mixed as one likes. fields: others of GenerateJob, the same for
        all. What could not be generated is in its group's `failures`. Waits while the pool is busy. Raises InvalidField
        for what is no prompt, before anything is submitted, and WaitTimeout if no group is complete for `timeout` s;
        what is not complete then, or when the call is cancelled, is cancelled. Results are acknowledged on return.
        """
        jobs = as_jobs(prompts, **fields, n=n, **({} if sampling is None else {"sampling": sampling}))
        client = self._itself()
        most = client._max_outstanding
        return await generate(client, client._inbox, client._reader, client._until, jobs, most=most, timeout=timeout)

    def session(
        self,
        *,
        session_id: str | None = None,
        system: str | None = None,
        token_ids: Sequence[int] | None = None,
        chat: bool = False,
        **fields: Any,
    ) -> Session:
        """A conversation, one turn after the other, on the worker that has its beginning in its cache; see Session.

        system: the first message of a chat. token_ids: given tokens that it begins with. chat: texts are messages of a
        user; so they are behind a system message. fields: those of GenerateJob, for every turn.
        """
        client = self._itself()
        given: dict[str, Any] = {"session_id": session_id, "system": system, "token_ids": token_ids, "chat": chat}
        return Session(client, client._inbox, **given, **fields)


async def _submitted(handle: JobHandle) -> JobHandle:
    return handle
