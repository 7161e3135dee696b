"""From a claimed payload to samples that can run: decode, check, tokenise. What cannot run is refused here, by name."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
import numpy.typing as npt

from ..messages.codec import decode, decode_one_of
from ..messages.errors import InvalidField, MessageError, RequestRefused
from ..messages.jobs import GenerateJob
from ..messages.kinds import JOBS
from ..messages.lease import Claim
from ..messages.results import Partial
from ..messages.tasks import TaskJob
from .adapters import FEATURE, check
from .chat_turns import after_context
from .engine import EngineInfo
from .held import HeldJob
from .media import must_fetch, with_media_here
from .samples import SampleRun
from .task_intake import needs_tokenizer, task_runs
from .task_requests import POOLING_FEATURES
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)
SMALL = 64 << 10
"""Bytes of a payload that may be decoded on the event loop."""
Admitted = tuple[Claim, HeldJob | Exception]


async def admit_all(
    claims: list[Claim], info: EngineInfo, tokenizer: Tokenizer, media_hosts: frozenset[str] = frozenset()
) -> list[Admitted]:
    """Each claim with its job, or with why it is none.

    Tokenising, and the first import of a tokenizer, may take seconds: not on the loop that renews the lease. Small jobs
    that bring their tokens are done on the spot, a thread would cost more than they do.
    """
    quick = [_try_admit(claim, info, None) for claim in claims if len(claim.payload) <= SMALL]
    admitted = [found for found in quick if not isinstance(found[1], _TokenizerNeeded)]
    done = {claim.job_id for claim, _ in admitted}
    if slow := [claim for claim in claims if claim.job_id not in done]:
        admitted += await asyncio.to_thread(lambda: [_try_admit(claim, info, tokenizer, media_hosts) for claim in slow])
    return admitted


def _try_admit(
    claim: Claim, info: EngineInfo, tokenizer: Tokenizer | None, media_hosts: frozenset[str] = frozenset()
) -> Admitted:
    try:
        return claim, admit(claim, info, tokenizer, media_hosts)
    except (MessageError, RequestRefused, _TokenizerNeeded) as error:
        return claim, error
    except Exception as error:  # a tokenizer can raise anything; the job is named, its neighbours go on
        log.exception("job %s could not be admitted", claim.job_id)
        return claim, error


class _TokenizerNeeded(Exception):
    """The job has text, or media to fetch, and this was a try on the event loop, without a tokenizer."""


def admit(
    claim: Claim, info: EngineInfo, tokenizer: Tokenizer | None, media_hosts: frozenset[str] = frozenset()
) -> HeldJob:
    """The job with a SampleRun for each sample that is not published yet.

    Raises MessageError if the payload is not a job, RequestRefused if this kind of engine cannot run it, AdapterMissing
    if it cannot for want of an adapter. What is saved of a sample and cannot be read is not fatal: the sample goes on
    from what can.
    """
    job = decode_one_of(claim.payload, JOBS)
    if job.id != claim.job_id:
        raise MessageError(f"the payload is job {job.id}, it was queued as {claim.job_id}")
    if job.n != claim.n:
        raise InvalidField("n", job.n, f"{claim.n}, as the job was queued")
    held = HeldJob(claim, job)
    if claim.left_s is not None:
        held.deadline = time.monotonic() + claim.left_s
    if isinstance(job, TaskJob):
        if tokenizer is None and needs_tokenizer(job):
            raise _TokenizerNeeded
        held.samples.update(task_runs(job, claim, info, tokenizer))
        return held
    assert isinstance(job, GenerateJob)
    if not claim.ending:  # nothing more is generated of such a job: whoever has it can end it
        _check(job, info)
    if job.tools:
        _check_tools(job, tokenizer)
    if job.media and not claim.ending:
        job = held.job = _with_media(job, tokenizer, media_hosts)
    prompt = _prompt(job, tokenizer)
    room = info.context_length - len(prompt)
    if job.sampling.max_new_tokens > room and not claim.ending:
        raise RequestRefused(
            f"sampling.max_new_tokens={job.sampling.max_new_tokens}: the prompt has {len(prompt)} tokens and the "
            f"context {info.context_length}, so at most {max(0, room)} are possible"
        )
    for index in range(job.n):
        if index in claim.published:
            continue
        sample = SampleRun(job, prompt, index, claim.attempt, claim.queued_s, adapters=info.adapters)
        if claim.ending or not job.media:  # see EngineRequest.media
            sample.resume_from(_readable(claim.partials.get(index, ()), job.lora is not None))
        held.samples[index] = sample
    return held


def _check(job: GenerateJob, info: EngineInfo) -> None:
    """Whether this engine can run it at all."""
    check(job, info.adapters, info.features)
    if pooling := info.features & POOLING_FEATURES:
        raise RequestRefused(f"this worker's model does not generate: {info.name} was started for {', '.join(pooling)}")
    if missing := job.unsupported(info.features | {FEATURE}):
        raise RequestRefused(f"{', '.join(missing)}: not supported by {info.name} {info.version} on this worker")


def _with_media(job: GenerateJob, tokenizer: Tokenizer | None, hosts: frozenset[str]) -> GenerateJob:
    if tokenizer is None and must_fetch(job):
        raise _TokenizerNeeded
    return with_media_here(job, hosts)


def _prompt(job: GenerateJob, tokenizer: Tokenizer | None) -> npt.NDArray[np.int32]:
    if job.token_ids is not None:
        return job.token_ids
    if tokenizer is None:
        raise _TokenizerNeeded
    messages = [message.rendered() for message in job.messages or ()]
    tools = [tool.rendered() for tool in job.tools] or None
    if job.context_ids is not None and job.context_ids.size:
        return after_context(tokenizer, job.context_ids, text=job.text, messages=messages, tools=tools)
    if job.text is not None:
        return tokenizer.encode(job.text)
    return tokenizer.encode_chat(messages, tools=tools) if tools else tokenizer.encode_chat(messages)


def _check_tools(job: GenerateJob, tokenizer: Tokenizer | None) -> None:
    """What reads the calls must be here before the job runs: raises RequestRefused."""
    if tokenizer is None:
        raise _TokenizerNeeded
    from .tool_calls import check_parser  # noqa: PLC0415 – only where a job has tools

    check_parser(job.tool_parser)
    tokenizer.decode(np.zeros(1, np.int32))


def _readable(blobs: tuple[bytes, ...], lora: bool) -> list[Partial]:
    """The pieces up to the first that cannot be read or does not go on where the one before it ended.

    lora: whether they must say which versions of an adapter sampled them.
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
