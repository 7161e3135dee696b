"""Jobs and messages that should not be there: poison, garbage, giants."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from redis.asyncio import Redis

from rolloutmq import ChatMessage, GenerateJob, InvalidField, JobFailure, SamplingParams
from rolloutmq.messages import Broker, Keys

from ..context import Chaos, Trainer, until
from ..habits import POISON
from ..looks import held, letters, part_of
from ..scenario import scenario

MAX_LOST = 3
MIB = 1 << 20


@scenario("poison_job_kills_its_worker", lease_s=0.5)
async def poison_process(chaos: Chaos) -> None:
    """A job whose prompt kills the process, every time. Something restarts workers, as Kubernetes would."""
    options = {"max_running": 16, "tokens_per_s": 200, "poison": "process", "max_lost": MAX_LOST}
    poison = chaos.job(token_ids=[POISON, 1, 2])
    neighbours = chaos.jobs(24, n=2, tokens=20)
    jobs = [*neighbours, poison]
    chaos.rng.shuffle(jobs)
    async with chaos.client() as trainer:
        first = (await chaos.start_workers(2, **options))[0]
        hosts = {worker.id for worker in chaos.workers}
        await trainer.submit(jobs)
        taking = asyncio.create_task(trainer.take())
        deaths = 0
        while not taking.done():
            dead = [worker for worker in chaos.workers if not worker.alive]
            if len(dead) > deaths:
                deaths += 1
                hosts.add((await chaos.worker(**options)).id)
            await asyncio.sleep(0.02)
        taken = taking.result()
        await _buried(chaos, poison, taken, hosts, first.id.split("-")[0])
        died = sum(not worker.alive for worker in chaos.workers)  # the last one perhaps while another was started
        chaos.expect(died >= MAX_LOST, f"it killed {died} workers")


@scenario("poison_job_kills_its_engine")
async def poison_engine(chaos: Chaos) -> None:
    """A job that kills the engine, not the worker: the engine is restarted, the neighbours go on."""
    worker = await chaos.worker(max_running=16, tokens_per_s=200, poison="engine", max_lost=MAX_LOST)
    poison = chaos.job(token_ids=[POISON, 1, 2])
    jobs = [*chaos.jobs(24, n=2, tokens=20), poison]
    chaos.rng.shuffle(jobs)
    async with chaos.client() as trainer:
        await trainer.submit(jobs)
        await _buried(chaos, poison, await trainer.take(), {worker.id}, worker.id.split("-")[0])
    chaos.expect(len(worker.all("joined")) == 1, "the worker itself did not survive")


async def _buried(chaos: Chaos, poison: GenerateJob, taken: list[object], workers: set[str], host: str) -> None:
    failures = [one for one in taken if isinstance(one, JobFailure)]
    chaos.expect([one.job_id for one in failures] == [poison.id], f"failed: {[str(one) for one in failures]}")
    async with chaos.broker() as broker:
        found = await letters(broker)
    chaos.expect([letter.job_id for letter in found] == [poison.id], f"dead letters: {found}")
    for letter in found:
        chaos.expect(str(MAX_LOST) in letter.cause, f"its cause is {letter.cause!r}")
        chaos.expect(letter.host in workers or letter.host == host, f"its host is {letter.host!r}")
        chaos.expect(letter.attempts == MAX_LOST, f"it was tried {letter.attempts} times")


@scenario("malformed_messages", lossless=True)
async def malformed(chaos: Chaos) -> None:
    """Garbage in jobs' records, on the bell and on a reply stream; nothing else suffers from it."""
    async with chaos.client() as trainer, chaos.broker() as broker:
        jobs = chaos.jobs(40, n=2)
        await trainer.submit(jobs)
        broken = chaos.rng.sample(jobs, 8)
        for job in broken:
            its = part_of(broker, job.id)
            payload = await its.redis.hget(its.keys.job(job.id), "p")
            await its.redis.hset(its.keys.job(job.id), "p", _garbage(chaos, payload))
        keys, db = broker.parts[chaos.struck].keys, broker.parts[chaos.struck].redis
        strangers = await _garbage_replies(chaos, db, keys)
        worker = await chaos.worker(max_running=32, tokens_per_s=500)
        for _ in range(50):
            fields = {chaos.rng.choice(["kind", "m", "x"]): chaos.rng.randbytes(9) for _ in range(2)}
            await db.xadd(keys.bell, fields)
            await db.xadd(keys.bell, {"kind": "command", "worker": "", "id": chaos.rng.randbytes(5).hex()})
        chaos.terms = replace(chaos.terms, unreadable=frozenset(strangers))
        taken = await trainer.take()
        await trainer.submit(chaos.jobs(8))
        taken += await trainer.take()
    failed = {one.job_id: one for one in taken if isinstance(one, JobFailure) and one.job_id not in strangers}
    chaos.expect(set(failed) <= {job.id for job in broken}, "a sound job failed")
    chaos.expect(all(one.error and one.cause for one in failed.values()), "a failure does not say why")
    chaos.expect(len(worker.all("joined")) == 1, "the worker lost its lease over garbage")
    chaos.notes["garbage_refused"] = len(failed)


def _garbage(chaos: Chaos, payload: bytes) -> bytes:
    rng = chaos.rng
    cut = payload[: rng.randrange(len(payload))]
    flipped = bytearray(payload)
    flipped[rng.randrange(3)] ^= 0x55
    return rng.choice([b"", cut, bytes(flipped), rng.randbytes(200), payload[:3] + b"\x81\xa1x" + rng.randbytes(8)])


async def _garbage_replies(chaos: Chaos, db: Redis, keys: Keys) -> set[str]:
    """Entries that no script wrote, on the trainer's stream; the job ids that they name."""
    stranger = chaos.job().id
    for fields in (
        {"x": "y"},
        {"j": stranger, "s": "0", "m": chaos.rng.randbytes(40)},
        {"j": stranger, "s": "zero", "m": b"", "l": "0"},
        {"j": b"\xff\xfe", "o": "nothing", "c": b"\xff"},
    ):
        await db.xadd(keys.reply("trainer"), fields)  # type: ignore[arg-type]
    return {stranger, "", b"\xff\xfe".decode(errors="replace")}


@scenario("payloads_of_1_to_64_MB", lease_s=2.0, timeout_s=120.0)
async def giants(chaos: Chaos) -> None:
    """Jobs of 1 to almost 64 MiB among small ones; a worker dies with them. Over 64 MiB the producer refuses."""
    options = {"max_running": 64, "tokens_per_s": 400}
    victim = await chaos.worker(**options)
    sizes = [1, 4, 16, 63]
    giants = [_giant(chaos, size * MIB) for size in sizes]
    async with chaos.client() as trainer, chaos.broker() as broker:
        await _too_large_is_refused(chaos, trainer)
        for giant in giants:
            await trainer.submit([giant, *chaos.jobs(4)])
        await until(lambda: _held(broker, victim.id, giants), 30, "the giants to be claimed")
        await chaos.start_workers(1, **options)
        await chaos.died(victim)
        long = chaos.job(tokens=130_000, sampling=SamplingParams(max_new_tokens=130_000))
        await trainer.submit([long])
        heir = chaos.workers[-1]
        fast = await chaos.worker(max_running=4, tokens_per_s=None)
        await heir.drain(20)
        taken = await trainer.take()
        chaos.expect(fast.alive and len(taken) >= len(giants), "giants did not come back")
        chaos.expect(any(len(one.token_ids) == 130_000 for one in taken), "the large result is missing")
    chaos.notes["largest_mib"] = max(sizes)


async def _too_large_is_refused(chaos: Chaos, trainer: Trainer) -> None:
    try:
        await trainer.client.submit_many([chaos.job(), _giant(chaos, 65 * MIB)])
    except InvalidField as error:
        chaos.expect("bytes" in str(error), str(error))
    else:
        chaos.expect(False, "65 MiB were accepted")


async def _held(broker: Broker, worker: str, jobs: list[GenerateJob]) -> bool:
    return {job.id for job in jobs} <= await held(broker, worker)


def _giant(chaos: Chaos, nbytes: int) -> GenerateJob:
    turns, left = [], nbytes
    while left > 0:
        turns.append(ChatMessage(role="user", content=chaos.rng.choice("abc") * min(left, 8 * MIB - 1)))
        left -= 8 * MIB - 1
    sampling = SamplingParams(max_new_tokens=2000)
    return GenerateJob(id=chaos.job().id, messages=tuple(turns), sampling=sampling)
