"""Jobs that still wait in a pool: copied without taking them, and generated here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ...messages.broker import Broker, Claim, read_jobs
from ...messages.errors import EngineDead, EngineError
from ...messages.ids import is_id
from ...messages.model import RolloutResult
from ...messages.redis import text, whole
from ...sync.disk import SnapshotStore
from ...worker.engine import Engine
from ...worker.jobs import HeldJob, SampleRun, admit_all, as_result
from ...worker.text import ModelTokenizer, Tokenizer
from .settings import Settings
from .tokens import AT_ONCE, engine_of, load_weights


class Answer(NamedTuple):
    """What became of a copied job: its results by number of the sample, or why there are none."""

    job_id: str
    results: tuple[RolloutResult, ...] = ()
    problem: str = ""


async def waiting(broker: Broker, limit: int) -> list[Claim]:
    """Copies of at most `limit` jobs that wait, as a worker would get them; the highest class first.

    It only reads. A job that a worker claims meanwhile is that worker's. What is no job's record is passed over.
    """
    if len(broker.parts) > 1:
        return [one for part in broker.parts for one in await waiting(part, limit)][:limit]
    redis, keys, found = broker.redis, broker.keys, list[Claim]()
    waits = [await redis.zrange(key, 0, limit - 1) for key in (*keys.queues, *keys.later)]
    for job_id in filter(is_id, (text(member).rpartition(":")[2] for member in chain(*waits))):
        if len(found) == limit:
            break
        (its,) = await read_jobs(redis, keys, [job_id], "state", "payload", "samples")
        if its.get("state") == b"q" and "payload" in its:
            found.append(Claim(job_id, 1, whole(its.get("samples")), 0.0, None, its["payload"]))
    return found


def generate_copies(claims: Sequence[Claim], settings: Settings, version: int | None = None) -> list[Answer]:
    """Generate copied jobs with an engine of this process, and nothing of it goes to the pool.

    version: of the weights; None for the newest in the folder of snapshots, or the base model without such a folder.
    Raises ConfigError without a model, InvalidField, WeightSyncError, and EngineError if the engine does not start.
    """
    settings = settings.for_model_of(())
    if version is None:
        saved = [] if settings.snapshots is None else SnapshotStore(settings.snapshots).versions()
        version = saved[-1] if saved else 0
    path, model = settings.path_of(version), str(settings.model)
    with engine_of(settings) as (engine, runner):
        if str(path) != model:
            runner.run(load_weights(engine, path, version))
        return runner.run(answers(claims, engine, ModelTokenizer(model), version))


async def answers(claims: Sequence[Claim], engine: Engine, tokenizer: Tokenizer, version: int) -> list[Answer]:
    """What each copied job generates with the weights that the engine has, which are `version`. Raises EngineDead."""
    places, found = asyncio.Semaphore(AT_ONCE), dict[str, Answer]()

    async def one(job_id: str, held: HeldJob) -> None:
        runs = [run for run in held.samples.values() if isinstance(run, SampleRun)]
        if not runs:
            found[job_id] = Answer(job_id, problem="it generates no tokens")
            return
        try:
            await asyncio.gather(*(_generate(engine, places, run, version) for run in runs))
        except EngineDead:
            raise
        except EngineError as error:
            found[job_id] = Answer(job_id, problem=str(error))
            return
        results = [as_result(run, "replay", engine.info, tokenizer) for run in runs]
        found[job_id] = Answer(job_id, tuple(each for each in results if isinstance(each, RolloutResult)))

    held: list[tuple[str, HeldJob]] = []
    async for claim, admitted in admit_all(list(claims), engine.info, tokenizer):
        if isinstance(admitted, HeldJob):
            held.append((claim.job_id, admitted))
        else:
            found[claim.job_id] = Answer(claim.job_id, problem=str(admitted) or "its media are addresses")
    await asyncio.gather(*(one(*each) for each in held))
    return [found[claim.job_id] for claim in claims]


async def _generate(engine: Engine, places: asyncio.Semaphore, run: SampleRun, version: int) -> None:
    request = run.next_request(version)
    leg = run.leg
    assert leg is not None
    async with places:
        output = await engine.generate(request)
    run.absorb(leg, output, 0.0)
    run.finish_reason = run.finish_reason or "abort"
