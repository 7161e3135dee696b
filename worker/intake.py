"""From a claimed payload to samples that can run: decode, check, tokenise. What cannot run is refused here, by name."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
import numpy.typing as npt

from ..messages.codec import decode
from ..messages.errors import InvalidField, MessageError, RequestRefused
from ..messages.jobs import GenerateJob
from ..messages.lease import Claim
from ..messages.results import Partial
from .adapters import FEATURE, check
from .engine import EngineInfo
from .held import HeldJob
from .samples import SampleRun
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)
SMALL = 64 << 10
"""Bytes of a payload that may be decoded on the event loop."""
Admitted = tuple[Claim, HeldJob | Exception]


async def admit_all(claims: list[Claim], info: EngineInfo, tokenizer: Tokenizer) -> list[Admitted]:
    """Each claim with its job, or with why it is none.

    Tokenising, and the first import of a tokenizer, may take seconds: not on the loop that renews the lease. Small jobs
    that bring their tokens are done on the spot, a thread would cost more than they do.
    """
    quick = [_try_admit(claim, info, None) for claim in claims if len(claim.payload) <= SMALL]
    admitted = [found for found in quick if not isinstance(found[1], _TokenizerNeeded)]
    done = {claim.job_id for claim, _ in admitted}
    if slow := [claim for claim in claims if claim.job_id not in done]:
        admitted += await asyncio.to_thread(lambda: [_try_admit(claim, info, tokenizer) for claim in slow])
    return admitted


def _try_admit(claim: Claim, info: EngineInfo, tokenizer: Tokenizer | None) -> Admitted:
    try:
        return claim, admit(claim, info, tokenizer)
    except (MessageError, RequestRefused, _TokenizerNeeded) as error:
        return claim, error
    except Exception as error:  # a tokenizer can raise anything; the job is named, its neighbours go on
        log.exception("job %s could not be admitted", claim.job_id)
        return claim, error


class _TokenizerNeeded(Exception):
    """The job has text, and this was a try without a tokenizer."""


def admit(claim: Claim, info: EngineInfo, tokenizer: Tokenizer | None) -> HeldJob:
    """The job with a SampleRun for each sample that is not published yet.

    Raises MessageError if the payload is not a job, RequestRefused if this kind of engine cannot run it, AdapterMissing
    if it cannot for want of an adapter. What is saved of a sample and cannot be read is not fatal: the sample goes on
    from what can.
    """
    job = decode(claim.payload, GenerateJob)
    if job.id != claim.job_id:
        raise MessageError(f"the payload is job {job.id}, it was queued as {claim.job_id}")
    if job.n != claim.n:
        raise InvalidField("n", job.n, f"{claim.n}, as the job was queued")
    check(job, info.adapters, info.features)
    if missing := job.unsupported(info.features | {FEATURE}):
        raise RequestRefused(f"{', '.join(missing)}: not supported by {info.name} {info.version} on this worker")
    prompt = _prompt(job, tokenizer)
    room = info.context_length - len(prompt)
    if job.sampling.max_new_tokens > room:
        raise RequestRefused(
            f"sampling.max_new_tokens={job.sampling.max_new_tokens}: the prompt has {len(prompt)} tokens and the "
            f"context {info.context_length}, so at most {max(0, room)} are possible"
        )
    held = HeldJob(claim, job)
    if claim.left_s is not None:
        held.deadline = time.monotonic() + claim.left_s
    for index in range(job.n):
        if index in claim.published:
            continue
        sample = SampleRun(job, prompt, index, claim.attempt, claim.queued_s, adapters=info.adapters)
        sample.resume_from(_readable(claim.partials.get(index, ()), job.lora is not None))
        held.samples[index] = sample
    return held


def _prompt(job: GenerateJob, tokenizer: Tokenizer | None) -> npt.NDArray[np.int32]:
    if job.token_ids is not None:
        return job.token_ids
    if tokenizer is None:
        raise _TokenizerNeeded
    if job.text is not None:
        return tokenizer.encode(job.text)
    assert job.messages is not None
    return tokenizer.encode_chat([message.model_dump() for message in job.messages])


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
