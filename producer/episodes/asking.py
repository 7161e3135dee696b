"""One answer of the model as one job, under an id that a restarted client gives it again."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

from ...messages.broker import Reply
from ...messages.codec import encode
from ...messages.errors import JobFailed
from ...messages.model import GenerateJob, JobFailure, RolloutResult
from ..core import ClientCore
from ..inbox import OPEN_STATES, as_failure

ASKED = 16
"""How often an answer is asked for, under new ids, where an earlier process took its outcome or cancelled it."""


async def ask(core: ClientCore, place: str, fields: dict[str, Any], held: list[Reply]) -> RolloutResult:
    """The job's result. Its outcome goes into `held`, and stays on the reply stream until it is acknowledged.

    place: what tells this job from every other one of the client. fields: of the job, but for its id. If the caller is
    cancelled, so is the job. Raises InvalidField, JobFailed, and what `submit` raises.
    """
    job = GenerateJob.build(**fields, id="0" * 32)
    # Where it should run is not what is asked: workers have other names in the next run.
    content = encode(job.model_copy(update={"prefer_worker": None}))
    for attempt in range(ASKED):
        digest = hashlib.blake2b(f"{place}/{attempt}/".encode() + content, digest_size=16)
        job_id = digest.hexdigest()
        asked = job.model_copy(update={"id": job_id})
        core.inbox.reserve(job_id)
        try:
            [handle] = await core.submit_many([asked], None)
            await core.until(partial(core.inbox.is_over, job_id), None)
        except BaseException:
            core.inbox.submit(asked)  # its submission may be what was cut off, and its outcome on the way
            await core.give_up([job_id])
            raise
        replies = core.inbox.take_job(job_id)
        core.inbox.release(job_id)
        outcomes = [reply.outcome for reply in replies]
        result = next((it for it in outcomes if isinstance(it, RolloutResult)), None)
        if result is not None:
            held += replies
            return result
        core.reader.ack(replies)
        failure = next((it for it in outcomes if isinstance(it, JobFailure)), as_failure(job_id, handle.state))
        # The job failed in this process, or failed before and nobody had been told. Else an earlier process took its
        # outcome or cancelled it, and nothing of it is left: ask for another job.
        if handle.state in OPEN_STATES or (replies and failure.outcome != "cancelled"):
            break
    raise JobFailed(failure)
