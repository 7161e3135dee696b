"""Embeddings, scores and rewards from a pool, as calls that return arrays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ...messages.errors import InvalidField, JobFailed, PoolBusy, WaitTimeout
from ...messages.model import (
    EmbedJob,
    EmbedResult,
    JobFailure,
    PoolingJob,
    RewardJob,
    RewardResult,
    ScoreJob,
    ScoreResult,
    TaskJob,
    TaskResult,
)
from ..core import ClientCore, left_of
from ..sending import enqueued, send_all

R = TypeVar("R", bound=TaskResult)
INPUTS_PER_JOB = 64
"""Inputs of one job: enough to cost little in the queue, few enough to spread over workers."""
Floats = npt.NDArray[np.float32]


async def embed(
    core: ClientCore,
    inputs: Sequence[Any],
    dimensions: int | None,
    normalize: bool,
    timeout: float | None,
    **fields: Any,
) -> Floats:
    """See RolloutClient.embed."""
    fields |= {"dimensions": dimensions} if dimensions is not None else {}
    fields |= {} if normalize else {"normalize": False}
    results = await _pooled(core, EmbedJob, EmbedResult, inputs, timeout, **fields)
    return np.stack([result.embedding for result in results]).astype(np.float32, copy=False)


async def reward(core: ClientCore, inputs: Sequence[Any], timeout: float | None, **fields: Any) -> list[RewardResult]:
    """See RolloutClient.reward."""
    return await _pooled(core, RewardJob, RewardResult, inputs, timeout, **fields)


async def score(
    core: ClientCore, prompt: Any, continuations: Sequence[Any], timeout: float | None, **fields: Any
) -> list[ScoreResult]:
    """See RolloutClient.score."""
    fields[_PROMPTS[_form("prompt", [prompt])]] = prompt
    form = _form("continuations", continuations)
    if form == "conversations":
        raise InvalidField("continuations", continuations, "sequences of token ids, or texts")
    name = "texts" if form == "texts" else "continuations"
    parts = [list(continuations[i : i + INPUTS_PER_JOB]) for i in range(0, len(continuations), INPUTS_PER_JOB)]
    jobs = [ScoreJob.build(**{name: part}, **fields) for part in parts]
    return await run_tasks(core, jobs, ScoreResult, timeout)


def similarity(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Cosine similarity, (n, m) float32, of (n, d) and (m, d). A single vector (d,) leaves its axis out of the result.

    0 with a vector of length 0. Raises InvalidField if the last axes differ.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not (1 <= left.ndim <= 2 and 1 <= right.ndim <= 2) or left.shape[-1] != right.shape[-1]:
        raise InvalidField("similarity", (left.shape, right.shape), "shapes (n, d) or (d,) with the same d")
    return np.asarray(_unit(left) @ _unit(right).T, dtype=np.float32)


def _unit(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(length == 0.0, 1.0, length))


_PROMPTS = {"token_ids": "token_ids", "texts": "text", "conversations": "messages"}


def _form(field: str, inputs: Sequence[Any]) -> str:
    """The form of the inputs: "texts", "token_ids" or "conversations". Raises InvalidField."""
    if isinstance(inputs, str) or not hasattr(inputs, "__len__") or not len(inputs):
        raise InvalidField(field, inputs, "a sequence of at least one input")
    forms = {_form_of(one) for one in inputs}
    if len(forms) > 1 or None in forms:
        raise InvalidField(field, inputs, "all texts, all sequences of token ids, or all sequences of chat messages")
    return cast(str, forms.pop())


def _form_of(one: Any) -> str | None:
    if isinstance(one, str):
        return "texts"
    if not isinstance(one, Sequence | np.ndarray) or not len(one):
        return None
    return "token_ids" if isinstance(one[0], int | np.integer) else "conversations"


async def _pooled(
    core: ClientCore,
    kind: type[PoolingJob],
    result: type[R],
    inputs: Sequence[Any],
    timeout: float | None,
    **fields: Any,
) -> list[R]:
    form = _form("inputs", inputs)
    parts = [list(inputs[i : i + INPUTS_PER_JOB]) for i in range(0, len(inputs), INPUTS_PER_JOB)]
    return await run_tasks(core, [kind.build(**{form: part}, **fields) for part in parts], result, timeout)


async def run_tasks(core: ClientCore, jobs: Sequence[TaskJob], kind: type[R], timeout: float | None = None) -> list[R]:
    """Submit `jobs` and return all their results, job by job and input by input. Waits while the pool is full.

    Results are taken while jobs are still being sent, because these results may be what fills the pool. Raises
    JobFailed, and WaitTimeout after `timeout` seconds. An error, or the caller's cancellation, cancels open jobs.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    mine = [job.model_copy(update={"reply_to": core.client_id}) for job in jobs]
    await core.open()
    await core.features.check(mine)
    for job in mine:  # the first result may arrive before the reply to the submission
        core.inbox.expect(job.id, job.n, job.deadline_s)
    core.reader.expect(mine)
    # No TaskGroup: until Python 3.13 it drops a cancellation that comes as one of its tasks fails.
    sending = asyncio.create_task(_send(core, mine, deadline))
    sending.add_done_callback(lambda _: core.reader.wake())
    try:
        results = [result for job in mine for result in await _take(core, job, kind, deadline, sending)]
        await sending
        return results
    except BaseException:
        sending.cancel()
        await _abandon(core, mine, sending)
        raise


async def _take(
    core: ClientCore, job: TaskJob, kind: type[R], deadline: float | None, sending: asyncio.Task[None]
) -> list[R]:
    inbox = core.inbox
    await core.until(lambda: inbox.is_over(job.id) or _failed(sending), left_of(deadline))
    if _failed(sending):
        await sending
    replies = inbox.take_job(job.id)
    inbox.release(job.id)
    # Not by `hand_over`, which gives them back if the caller gets nothing: nobody else can take results of a task, and
    # the call's next jobs may wait for the room that these ones have in the pool.
    core.reader.ack(replies)
    results: list[R] = []
    for reply in replies:
        if isinstance(reply.outcome, JobFailure):
            raise JobFailed(reply.outcome)
        assert isinstance(reply.outcome, kind)
        results.append(reply.outcome)
    return results


def _failed(sending: asyncio.Task[None]) -> bool:
    return sending.done() and (sending.cancelled() or sending.exception() is not None)


async def _send(core: ClientCore, jobs: list[TaskJob], deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    try:
        await send_all(partial(enqueued, core.broker), jobs, left)
        core.inbox.accepted(job.id for job in jobs)
    except PoolBusy as busy:
        raise WaitTimeout(
            f"{len(jobs) - busy.accepted - len(busy.beyond)} of {len(jobs)} jobs were not accepted: {busy}"
        ) from None


async def _abandon(core: ClientCore, jobs: Sequence[TaskJob], sending: asyncio.Task[None]) -> None:
    """Cancel these, and drop what comes of them. The caller's cancellation does not stop this."""
    left = [job.id for job in jobs if core.inbox.tracked(job.id) is not None]
    for job_id in left:
        core.reader.ack(core.inbox.abandon(job_id))
        core.inbox.release(job_id)
    await core.finish(_cancel(core, left, sending))


async def _cancel(core: ClientCore, job_ids: list[str], sending: asyncio.Task[None]) -> None:
    await asyncio.gather(sending, return_exceptions=True)
    if job_ids:
        await core.dropped.cancel(job_ids)
