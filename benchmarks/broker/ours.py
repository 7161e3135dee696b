"""RolloutMQ under the load of the queue benchmark: the real client, the real worker, an engine that answers at once.

`python -m benchmarks.broker.ours worker|client URL LOAD-JSON`

variant "" and "none": without a journal; "client": the client keeps one; "both": client and worker do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rolloutmq.messages.model import GenerateJob, RolloutResult, SamplingParams
from rolloutmq.producer.client import Outcome, RolloutClient
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted import ScriptedEngine
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

from ..peers import Load, Tally, main

POOL = "bench"
TOKENS = 16
"""Tokens generated per job. With their logprobs they have 128 bytes, as many as the peers' jobs return."""
MAX_RUNNING = 512
TIMEOUT_S = 60.0
_SAMPLING = SamplingParams(max_new_tokens=TOKENS)
_LOGPROBS = np.full(TOKENS, -1.0, np.float32).tobytes()


def work(url: str, load: Load) -> None:
    """Serve until SIGTERM."""
    with _journal(load, "both") as journal:
        asyncio.run(_work(url, journal))


@contextlib.contextmanager
def _journal(load: Load, *variants: str) -> Iterator[str | None]:
    """The folder for a journal, for as long as the turn lasts; None if this variant keeps none here."""
    if load.variant not in variants:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="bench-journal-", dir=Path.cwd()) as folder:
        yield folder


async def _work(url: str, journal: str | None) -> None:
    config = WorkerConfig(redis_url=url, pool=POOL, max_running=MAX_RUNNING, drain_s=2.0, journal=journal)
    worker = Worker(config, ScriptedEngine(echo=True), NoTokenizer())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    await worker.run()


def drive(url: str, load: Load) -> dict[str, float]:
    return asyncio.run(_latency(url, load) if load.rate else _throughput(url, load))


def job_of(payload: bytes) -> GenerateJob:
    """Return the payload as a prompt of int32 tokens."""
    return GenerateJob(token_ids=np.frombuffer(payload, "<i4"), sampling=_SAMPLING)


def jobs_of(numbers: range, reply_to: str) -> list[GenerateJob]:
    """The jobs with these numbers' payloads of 1 KB, as a client would submit them."""
    return [job_of(Load().payload(number)).model_copy(update={"reply_to": reply_to}) for number in numbers]


def check(tally: Tally, outcome: Outcome) -> None:
    """Exit unless `outcome` is the right answer to an open job."""
    if not isinstance(outcome, RolloutResult) or outcome.logprobs is None:
        raise SystemExit(f"not a whole result: {outcome}")
    if outcome.logprobs.tobytes() != _LOGPROBS:
        raise SystemExit(f"job {outcome.job_id}: wrong logprobs {outcome.logprobs}")
    tally.answered(outcome.job_id, outcome.token_ids.tobytes(), size=4 * TOKENS)


async def _throughput(url: str, load: Load) -> dict[str, float]:
    tally = Tally(load)

    def jobs(seconds: float) -> Iterator[GenerateJob]:
        for number, payload in tally.payloads(seconds):
            job = job_of(payload)
            tally.sent(job.id, number)
            yield job

    async def phase(seconds: float) -> dict[str, float]:
        async for outcome in client.map(jobs(seconds), window=load.window, timeout=TIMEOUT_S):
            check(tally, outcome)
        return tally.figures()

    with _journal(load, "client", "both") as journal:
        async with RolloutClient(url, POOL, journal=journal) as client:
            await phase(load.warmup_s)
            began = time.process_time()
            figures = await phase(load.seconds)
        spent = time.process_time() - began
        if client.journal is not None and client.journal.lost:
            raise SystemExit(f"the journal lost {client.journal.lost} entries")
        return figures | {"repeats": client.repeats, "client_us": 1e6 * spent / figures["jobs"]}


async def _latency(url: str, load: Load) -> dict[str, float]:
    """Measure latency. Jobs arrive at random (Poisson) times, `load.rate` a second, answered or not.

    Latency counts from the time at which a job was to arrive, even if this process sent it later, until the caller has
    its result.
    """
    tally, arrivals = Tally(load), random.Random(0)
    due: dict[str, float] = {}
    taken: list[float] = []
    sending: set[asyncio.Task[object]] = set()

    def sent(task: asyncio.Task[object]) -> None:
        sending.discard(task)
        fresh.set()

    async def take() -> None:
        while True:
            async for outcome in client.results(timeout=TIMEOUT_S):
                taken.append(time.perf_counter() - due.pop(outcome.job_id))
                check(tally, outcome)
            await asyncio.sleep(0)
            if over.is_set() and not tally.open:
                return
            await fresh.wait()
            fresh.clear()

    async def phase(seconds: float) -> None:
        at = time.perf_counter()
        for number, payload in tally.payloads(seconds):
            at += arrivals.expovariate(load.rate)
            if (pause := at - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            job = job_of(payload)
            tally.sent(job.id, number)
            due[job.id] = at
            task: asyncio.Task[object] = asyncio.create_task(client.submit(job))
            sending.add(task)
            task.add_done_callback(sent)
        await asyncio.gather(*sending)

    async with RolloutClient(url, POOL) as client:
        over, fresh = asyncio.Event(), asyncio.Event()
        taking = asyncio.create_task(take())
        await phase(load.warmup_s)
        skip = len(taken)
        await phase(load.seconds)
        over.set()
        fresh.set()
        await taking
    measured = np.sort(np.array(taken[skip:])) * 1000
    return {
        "jobs": float(len(measured)),
        "p50_ms": float(np.percentile(measured, 50)),
        "p99_ms": float(np.percentile(measured, 99)),
        "max_ms": float(measured[-1]),
    }


if __name__ == "__main__":
    main(work, drive)
