"""From a claimed payload to samples that can run: decode, check, tokenise. Refuses what this engine cannot run."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.broker import Claim
from ...messages.codec import JOBS, decode, decode_one_of
from ...messages.errors import InvalidField, MessageError, RequestRefused
from ...messages.model import EXACT, GenerateJob, Medium, Partial, PoolingJob, ScoreJob, TaskJob
from ..engine import FEATURE, POOLING_FEATURES, EngineInfo, check
from ..text import Tokenizer, after_context
from .held import HeldJob
from .media import must_fetch, with_media_here
from .sample import SampleRun
from .task import TaskRun

log = logging.getLogger(__name__)
SMALL = 64 << 10
"""Bytes of a payload that may be decoded on the event loop."""
FETCHES = 16
"""Jobs whose media are fetched at the same time."""
_FETCHERS = ThreadPoolExecutor(FETCHES, "rolloutmq-fetch")
_TOKENIZING = threading.Lock()
"""A tokenizer is not safe in several threads."""
Ids = npt.NDArray[np.int32]
Admitted = tuple[Claim, HeldJob | Exception]


class MustFetch(Exception):
    """The job's media are somewhere else; `admit_fetched` goes on with it. since: when it was claimed."""

    def __init__(self, job: GenerateJob, since: float) -> None:
        self.job, self.since = job, since


async def admit_all(claims: list[Claim], info: EngineInfo, tokenizer: Tokenizer) -> AsyncIterator[Admitted]:
    """Each claim with its job, or with the error that keeps it from running, or with MustFetch.

    Tokenising, and the first import of a tokenizer, may take seconds, so a thread does it and not the loop that renews
    the lease. Small jobs that bring their tokens are admitted on the spot: a thread would cost more.
    """
    slow, since = [], time.monotonic()
    for claim in claims:
        _, found = _try_admit(claim, info, None, since) if len(claim.payload) <= SMALL else (claim, _Later())
        if isinstance(found, _Later):
            slow.append(claim)
        else:
            yield claim, found
    if slow:
        for tried in await asyncio.to_thread(lambda: [_try_admit(claim, info, tokenizer, since) for claim in slow]):
            yield tried


async def admit_fetched(
    claim: Claim, later: MustFetch, info: EngineInfo, tokenizer: Tokenizer, media_hosts: frozenset[str] = frozenset()
) -> HeldJob | Exception:
    """Fetch the job's media and admit it. A slow address takes FETCH_S; at most FETCHES jobs are fetched at once."""
    media = await asyncio.get_running_loop().run_in_executor(_FETCHERS, _fetch, claim, later.job, media_hosts)
    if isinstance(media, Exception):
        return media
    return (await asyncio.to_thread(_try_admit, claim, info, tokenizer, later.since, media))[1]


def _fetch(claim: Claim, job: GenerateJob, hosts: frozenset[str]) -> tuple[Medium, ...] | Exception:
    """The media of a job, fetched, or the error that keeps it from running. Blocks."""
    try:
        return with_media_here(job, hosts).media
    except RequestRefused as error:
        return error
    except Exception as error:
        log.exception("media of job %s could not be fetched", claim.job_id)
        return error


def _try_admit(
    claim: Claim, info: EngineInfo, tokenizer: Tokenizer | None, since: float, media: tuple[Medium, ...] | None = None
) -> Admitted:
    try:
        with _TOKENIZING if tokenizer is not None else nullcontext():
            return claim, admit(claim, info, tokenizer, media, since)
    except (MessageError, RequestRefused, MustFetch, _Later) as error:
        return claim, error
    except Exception as error:  # a tokenizer can raise anything; the job is named, its neighbours go on
        log.exception("job %s could not be admitted", claim.job_id)
        return claim, error


class _Later(Exception):
    """The job needs a tokenizer, and this try had none."""


def admit(
    claim: Claim,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    media: tuple[Medium, ...] | None = None,
    since: float | None = None,
) -> HeldJob:
    """The job with a SampleRun for each sample that is not published yet.

    media: the job's, fetched. since: when it was claimed (time.monotonic), if that is not now.

    Raises MessageError if the payload is not a job, RequestRefused if this kind of engine cannot run it, AdapterMissing
    if the engine lacks its adapter. Saved pieces of a sample that cannot be read are left out: the sample goes on from
    those before them.
    """
    job = decode_one_of(claim.payload, JOBS)
    if job.id != claim.job_id:
        raise MessageError(f"the payload is job {job.id}, it was queued as {claim.job_id}")
    if job.n != claim.n:
        raise InvalidField("n", job.n, f"{claim.n}, as the job was queued")
    held = HeldJob(claim, job)
    if claim.left_s is not None:
        held.deadline = (time.monotonic() if since is None else since) + claim.left_s
    if isinstance(job, TaskJob):
        if tokenizer is None and _needs_tokenizer(job):
            raise _Later
        held.samples.update(_task_runs(job, claim, info, tokenizer))
        return held
    assert isinstance(job, GenerateJob)
    if not claim.ending:  # nothing more is generated of such a job: whoever has it can end it
        _check(job, info)
    if job.tools:
        _check_tools(job, tokenizer)
    if job.media and not claim.ending:
        job = held.job = _with_media(job, media, time.monotonic() if since is None else since)
    prompt = _prompt(job, tokenizer)
    room = info.context_length - len(prompt)
    if job.sampling.max_new_tokens > room and not claim.ending:
        raise RequestRefused(
            f"sampling.max_new_tokens={job.sampling.max_new_tokens}: the prompt has {len(prompt)} tokens and the "
            f"context length {info.context_length}, so at most {max(0, room)} are possible"
        )
    for index in range(job.n):
        if index in claim.published:
            continue
        sample = SampleRun(
            job, prompt, index, claim.attempt, claim.queued_s, adapters=info.adapters, starts_over=info.starts_over(job)
        )
        if claim.ending or not sample.starts_over:
            sample.resume_from(_readable(claim.partials.get(index, ()), job.lora is not None))
        held.samples[index] = sample
    return held


def _check(job: GenerateJob, info: EngineInfo) -> None:
    """Raises RequestRefused, or AdapterMissing, for a job that this engine cannot run."""
    check(job, info.adapters, info.features)
    if pooling := info.features & POOLING_FEATURES:
        raise RequestRefused(f"this worker's model does not generate: {info.name} was started for {', '.join(pooling)}")
    if missing := job.unsupported(info.features | {FEATURE, EXACT}):
        raise RequestRefused(f"{', '.join(missing)}: not supported by {info.name} {info.version} on this worker")


def _with_media(job: GenerateJob, fetched: tuple[Medium, ...] | None, since: float) -> GenerateJob:
    if not must_fetch(job):
        return with_media_here(job, ())
    if fetched is None:
        raise MustFetch(job, since)
    return job.model_copy(update={"media": fetched})


def _prompt(job: GenerateJob, tokenizer: Tokenizer | None) -> Ids:
    if job.token_ids is not None:
        return job.token_ids
    if tokenizer is None:
        raise _Later
    messages = [message.rendered() for message in job.messages or ()]
    tools = [tool.rendered() for tool in job.tools] or None
    if job.context_ids is not None and job.context_ids.size:
        return after_context(tokenizer, job.context_ids, text=job.text, messages=messages, tools=tools)
    if job.text is not None:
        return tokenizer.encode(job.text)
    return tokenizer.encode_chat(messages, tools=tools) if tools else tokenizer.encode_chat(messages)


def _check_tools(job: GenerateJob, tokenizer: Tokenizer | None) -> None:
    """Raises RequestRefused unless the parser of tool calls is here. It must be before the job runs."""
    if tokenizer is None:
        raise _Later
    from ..text import check_parser  # noqa: PLC0415 – only where a job has tools

    check_parser(job.tool_parser)
    tokenizer.decode(np.zeros(1, np.int32))


def _readable(blobs: tuple[bytes, ...], lora: bool) -> list[Partial]:
    """The pieces up to the first that cannot be read or does not go on where the one before it ended.

    lora: whether each piece must say which versions of an adapter sampled it.
    """
    pieces: list[Partial] = []
    tokens = version = adapter_version = 0
    for blob in blobs:
        try:
            piece = decode(blob, Partial)
        except MessageError:
            break
        if piece.start != tokens or not piece.segments or piece.segments[0].version < version:
            break
        if bool(piece.adapter_segments) != lora:
            break
        if piece.adapter_segments:
            if piece.adapter_segments[0].version < adapter_version:
                break
            adapter_version = piece.adapter_segments[-1].version
        pieces.append(piece)
        tokens, version = tokens + len(piece.token_ids), piece.segments[-1].version
    return pieces


def _task_runs(job: TaskJob, claim: Claim, info: EngineInfo, tokenizer: Tokenizer | None) -> dict[int, TaskRun]:
    """A run for each input that is not published yet, by its number.

    tokenizer: None only for a job for which `_needs_tokenizer` is False. Raises RequestRefused.
    """
    if missing := job.unsupported(info.features | {EXACT}):
        has = ", ".join(sorted(name for name in info.features if name.startswith("task:"))) or "no task but generate"
        raise RequestRefused(f"{', '.join(missing)}: not on this worker, whose {info.name} {info.version} has {has}")
    runs: dict[int, TaskRun] = {}
    for index, (ids, start) in enumerate(_task_inputs(job, tokenizer)):
        if index in claim.published:
            continue
        if len(ids) > info.context_length:
            raise RequestRefused(f"input {index} has {len(ids)} tokens: at most {info.context_length} fit this engine")
        if (worst := int(ids.max())) >= info.vocab_size:
            raise RequestRefused(f"input {index} has token {worst}: ids of this model are 0 to {info.vocab_size - 1}")
        runs[index] = TaskRun(job, ids, index, claim.attempt, claim.queued_s, start)
    return runs


def _needs_tokenizer(job: TaskJob) -> bool:
    """Whether an input of the job is text or messages."""
    if isinstance(job, ScoreJob):
        return job.token_ids is None or job.continuations is None
    assert isinstance(job, PoolingJob)
    return job.token_ids is None


def _task_inputs(job: TaskJob, tokenizer: Any) -> list[tuple[Ids, int]]:
    """Each input's ids, and the index of the first token that the result is about."""
    if isinstance(job, ScoreJob):
        prompt = _score_prompt(job, tokenizer)
        parts = job.continuations or tuple(tokenizer.encode(text, special=False) for text in job.texts or ())
        return [(np.concatenate([prompt, ids]), len(prompt)) for ids in parts]
    assert isinstance(job, PoolingJob)
    if job.token_ids is not None:
        return [(ids, 1) for ids in job.token_ids]
    if job.texts is not None:
        return [(tokenizer.encode(text), 1) for text in job.texts]
    return [
        (tokenizer.encode_chat([message.rendered() for message in chat], answer=False), 1)
        for chat in job.conversations or ()
    ]


def _score_prompt(job: ScoreJob, tokenizer: Any) -> Ids:
    if job.token_ids is not None:
        return job.token_ids
    if job.text is not None:
        return np.asarray(tokenizer.encode(job.text), dtype=np.int32)
    ids: Ids = tokenizer.encode_chat([message.rendered() for message in job.messages or ()])
    return ids
