"""Replay against a live pool: recorded jobs are submitted again as new jobs, and what comes back is compared.

The pool samples with the weights it has. So two equal samples prove something only if the version, the seed and the
engine are the recorded ones; every verdict says where they are not.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ...messages.errors import FeatureUnavailable
from ...messages.ids import derived_id, new_id
from ...messages.model import GenerateJob, RolloutResult
from ...producer import RolloutClient
from ..journal import Recorded
from .verdict import LOGPROB_LIMIT, Verdict, compared, unverified

log = logging.getLogger(__name__)
WINDOW = 64
_NOT_AGAIN = frozenset(
    [
        *("id", "reply_to", "group_id", "metadata", "priority", "deadline_s"),
        *("min_version", "exact_version", "max_staleness"),
        *("min_adapter_version", "prefer_worker", "prefer_s", "session_id", "stream", "trace_id"),
    ]
)
"""Fields of a job that say where and when it runs, and not what it generates."""


def client_of(replay_id: str) -> str:
    """The id of the client that gets a replay's results."""
    return f"replay-{replay_id}"


def resubmitted(job: GenerateJob, replay_id: str) -> GenerateJob:
    """The job that replays `job`: a new one with the same prompt, sampling, seed and number of samples.

    Its id depends only on the job's and the replay's (see `new_id` for that one), so it is the same job however often
    it is submitted. It has low priority, no deadline, and runs on whatever version the pool has.
    """
    fields: dict[str, Any] = {name: getattr(job, name) for name in job.model_fields_set - _NOT_AGAIN}
    digest = hashlib.sha256(f"{replay_id} {job.id}".encode()).digest()
    fields["id"] = derived_id(int(replay_id[:12], 16), digest)
    return GenerateJob.build(**fields, priority="low", metadata={"replayed_from": job.id})


async def replayed(
    client: RolloutClient,
    samples: Iterable[Recorded],
    replay_id: str,
    *,
    limit: float = LOGPROB_LIMIT,
    window: int = WINDOW,
    timeout: float | None = None,
) -> AsyncGenerator[Verdict]:
    """A verdict on each sample, as the pool's answers come. Coming back for the next verdict acknowledges an answer.

    client: of `client_of(replay_id)`; it should have a `before_ack` that puts the verdicts on the disk. Another process
    that goes on with a replay gives the samples that have no verdict yet, and every job still runs once. window: the
    most jobs in the pool at a time. timeout: seconds without an answer; None waits for ever. A full pool is waited for.
    Raises what `RolloutClient.map` raises.
    """
    waiting: dict[str, dict[int, Recorded]] = {}
    jobs: dict[str, GenerateJob] = {}
    for one in samples:
        if one.job is None:
            yield unverified(one, one.problem or "the journal does not have its job")
            continue
        job = resubmitted(one.job, replay_id)
        jobs.setdefault(job.id, job)
        waiting.setdefault(job.id, {})[one.result.sample] = one
    for job in list(jobs.values()):
        try:
            await client.check([job])
        except FeatureUnavailable as error:
            del jobs[job.id]
            for one in waiting.pop(job.id).values():
                yield unverified(one, f"no worker of the pool can run it: {error}")
    async for outcome in client.map(jobs.values(), window=window, timeout=timeout):
        expected = waiting.get(outcome.job_id, {})
        if not isinstance(outcome, RolloutResult):
            while expected:
                yield unverified(expected.popitem()[1], f"its replay failed: {outcome}")
        elif (found := expected.pop(outcome.sample, None)) is not None:
            yield judged(found, outcome, limit)
    for left in waiting.values():
        for one in left.values():
            yield unverified(one, "somebody else took its replay from the pool")


def replay_on_pool(
    samples: Iterable[Recorded], redis_url: str, pool: str, limit: float, moved: Callable[[int], None]
) -> list[Verdict]:
    """A verdict on each sample, in their order, from a replay of its own. Blocks until all are there. moved: called
    with the number of tokens of each."""

    async def run() -> dict[str, Verdict]:
        replay_id = new_id()
        async with RolloutClient(redis_url, pool, client_id=client_of(replay_id)) as client:
            if not await client.workers():
                log.warning("no worker serves pool %r yet; waiting for one", pool)
            found = {}
            async for verdict in replayed(client, given, replay_id, limit=limit):
                found[verdict.recorded.name] = verdict
                moved(len(verdict.recorded.result.token_ids))
            return found

    given = list(samples)
    found = asyncio.run(run())
    return [found[one.name] for one in given]


def judged(one: Recorded, again: RolloutResult, limit: float = LOGPROB_LIMIT) -> Verdict:
    """The verdict on a sample that a pool has generated again."""
    before, tokens = one.result, len(one.result.token_ids)
    token_ids, logprobs = np.full(tokens, -1, np.int32), np.full(tokens, np.nan, np.float32)
    both = min(tokens, len(again.token_ids))
    token_ids[:both] = again.token_ids[:both]
    if again.logprobs is not None:
        # Behind a token that differs, log-probabilities are those of another text.
        known = np.logical_and.accumulate(token_ids[:both] == before.token_ids[:both])
        logprobs[:both][known] = again.logprobs[:both][known]
    stopped, longer = before.finish_reason == "abort", len(again.token_ids) > tokens
    verdict = compared(
        one,
        token_ids,
        logprobs,
        limit,
        finish="" if stopped else again.finish_reason,
        reasons=["the recorded sample was stopped early: only the tokens it has are compared"] if stopped else [],
        differences=[f"the replay has {len(again.token_ids)} tokens"] if longer and not stopped else [],
        unproved=_doubts(one, again),
        engine=again.fingerprint,
    )
    if verdict.state == "differs" and not all("deterministic" in seen.fingerprint for seen in (before, again)):
        batches = "an engine was not deterministic: what a token gets depended on its batch"
        return replace(verdict, reasons=(*verdict.reasons, batches))
    return verdict


def _doubts(one: Recorded, again: RolloutResult) -> list[str]:
    """Why equal tokens would prove nothing, and what may explain others: a sentence each."""
    before, job, found = one.result, one.job, []
    if before.versions != again.versions or len(before.versions) > 1:
        found.append(
            f"other weights: the pool sampled with {_versions(again.versions)}, the journal has "
            f"{_versions(before.versions)}"
        )
    if before.adapter_segments != again.adapter_segments:
        found.append(f"another version of the adapter {before.adapter!r}")
    if job is not None and job.sampling.temperature > 0 and job.seed is None:
        found.append("no seed: its tokens were drawn at random")
    for name in sorted((before.fingerprint.keys() | again.fingerprint.keys()) - {"deterministic"}):
        was, now = before.fingerprint.get(name, "unknown"), again.fingerprint.get(name, "unknown")
        if was != now:
            found.append(f"another {name}: {now} in the pool, {was} in the journal")
    was_asked, is_asked = before.prompt_ids, again.prompt_ids
    if was_asked is not None and is_asked is not None and not np.array_equal(was_asked, is_asked):
        found.append("another prompt: the pool's tokenizer or chat template makes other tokens of it")
    return found


def _versions(versions: tuple[int, ...]) -> str:
    return f"version {', then '.join(map(str, versions))}" if versions else "no version"
