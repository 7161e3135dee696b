"""Clients that crash, submit twice, take slowly or not at all, and clocks that are wrong."""

from __future__ import annotations

import asyncio

from rolloutmq import GenerateJob, JobFailure, PoolBusy
from rolloutmq.messages import Broker, Caps
from rolloutmq.messages.codec import MAJOR, MINOR

from ..context import Chaos, Trainer, until
from ..habits import Options
from ..looks import letters
from ..processes import ClientProcess
from ..scenario import scenario

KIB = 1 << 10
HOUR = 3600.0


@scenario("client_crashes_mid_stream", lossless=True)
async def client_crashes(chaos: Chaos) -> None:
    """SIGKILL of the trainer's process in the middle of its results, twice; it starts again under the same id, submits
    everything once more, and has every outcome in the end."""
    await chaos.worker(max_running=16, tokens_per_s=200)
    jobs = chaos.jobs(60, n=2, tokens=40)
    for run in range(2):
        crashing = await chaos.client_process(jobs, "trainer", f"run{run}")
        await crashing.heard("taken", chaos.rng.randint(5, 40))
        await crashing.kill()
    last = await chaos.client_process(jobs, "trainer", "run2")
    await _well_ended(chaos, last)
    chaos.notes["handed_again_at_most"] = 2 * READ_AHEAD


READ_AHEAD = 512
"""A client acknowledges in batches: what it had come back for less than a second before its death may come again."""


async def _well_ended(chaos: Chaos, *clients: ClientProcess) -> None:
    codes = [await client.ended(30) for client in clients]
    chaos.expect(codes == [0] * len(codes), f"exit codes of the clients: {codes}")


@scenario("ten_concurrent_duplicate_submits", lossless=True)
async def duplicates(chaos: Chaos) -> None:
    """The same jobs ten times at the same time, over ten connections, in ten orders, while they run and after."""
    jobs = chaos.jobs(100, n=2, tokens=10)

    async def submit() -> None:
        order = list(jobs)
        chaos.rng.shuffle(order)
        addressed = [job.model_copy(update={"reply_to": "trainer"}) for job in order]
        async with chaos.broker() as broker:
            for start in range(0, len(order), 7):
                await broker.enqueue(addressed[start : start + 7])

    async with chaos.client() as trainer:
        await chaos.worker(max_running=32, tokens_per_s=200)
        await asyncio.gather(trainer.submit(jobs), *(submit() for _ in range(9)))
        await trainer.take(50)
        await asyncio.gather(*(submit() for _ in range(3)))
        taken = await trainer.take()
        chaos.expect(trainer.client.repeats == 0, f"{trainer.client.repeats} outcomes came twice")
        chaos.expect(len(taken) == 150, f"{len(taken)} outcomes after the first 50")


@scenario("slow_and_absent_consumers", lossless=True)
async def slow_consumers(chaos: Chaos) -> None:
    """One client takes slowly, one not at all, one normally. What lies about unread is bounded, nothing is thrown away,
    and the third is not held up."""
    caps = Caps(unread=64 * KIB)
    await chaos.worker(max_running=16, tokens_per_s=None)
    worst: dict[str, int] = {}
    async with (
        chaos.client(client_id="slow", caps=caps) as slow,
        chaos.client(client_id="absent", caps=caps) as absent,
        chaos.client(client_id="normal", caps=caps) as normal,
        chaos.broker() as broker,
    ):
        watching = asyncio.create_task(_watch_unread(broker, worst))
        refused = await _submit_until_refused(chaos, absent)
        chaos.expect(refused is not None and refused.reason == "unread", f"the absent client was refused: {refused}")
        await asyncio.gather(_slowly(chaos, slow, broker), _normally(chaos, normal))
        await until(lambda: _nothing_open(broker), what="every job to end")
        watching.cancel()
        bound = caps.unread + 3 * BATCH * RESULT_BYTES
        for client, most in worst.items():
            chaos.expect(most <= bound, f"{most} bytes of {client} were unread; the cap is {caps.unread}")
        chaos.expect(await absent.take(), "the absent client had nothing when it came back")
    chaos.notes["most_unread_bytes"] = worst


BATCH = 16
RESULT_BYTES = 10 * KIB


async def _submit_until_refused(chaos: Chaos, trainer: Trainer) -> PoolBusy | None:
    for _ in range(100):
        jobs = _bulky(chaos)
        try:
            await trainer.submit(jobs)
        except PoolBusy as busy:
            trainer.accepted(jobs[: busy.accepted] + [jobs[place] for place in busy.beyond])
            return busy
        async with chaos.broker() as broker:
            await until(lambda here=broker: _nothing_open(here), what="the worker to answer")  # type: ignore[misc]
    return None


async def _slowly(chaos: Chaos, trainer: Trainer, broker: Broker) -> None:
    """Takes ten a second or so, and submits whenever it may and nothing is open.

    The cap counts results that are there. What is open comes on top of it, and how much that is depends on the speed of
    the machine where a client submits meanwhile.
    """
    waiting: list[GenerateJob] = []
    accepted = 0
    while accepted < 6 * BATCH:
        await until(lambda: _nothing_open(broker), 60, "the worker to answer")
        waiting = waiting or _bulky(chaos)
        try:
            await trainer.submit(waiting)
            accepted, waiting = accepted + len(waiting), []
        except PoolBusy as busy:
            trainer.accepted(waiting[: busy.accepted])
            accepted, waiting = accepted + busy.accepted, waiting[busy.accepted :]
            await trainer.take(1)
            await asyncio.sleep(0.01)  # that is how slow it is
    await trainer.take()


async def _normally(chaos: Chaos, trainer: Trainer) -> None:
    for _ in range(10):
        await trainer.submit(chaos.jobs(10))
        await trainer.take()


def _bulky(chaos: Chaos) -> list[GenerateJob]:
    return chaos.jobs(BATCH, tokens=1000)


async def _nothing_open(broker: Broker) -> bool:
    return (await broker.load()).open_jobs == 0


async def _watch_unread(broker: Broker, worst: dict[str, int]) -> None:
    while True:
        for client, nbytes in (await broker.unread()).items():
            worst[client] = max(worst.get(client, 0), nbytes)
        await asyncio.sleep(0.005)


@scenario("wall_clocks_an_hour_off")
async def clocks(chaos: Chaos) -> None:
    """Workers an hour ahead and behind, and clients too: leases, deadlines and the order of things do not notice."""
    ahead = await chaos.worker(max_running=16, tokens_per_s=100, clock_s=HOUR)
    behind = await chaos.worker(max_running=16, tokens_per_s=100, clock_s=-HOUR)
    clients = [
        await chaos.client_process(chaos.jobs(10, n=2, deadline_s=40.0), f"client-{way}", f"clock-{way}", options)
        for way, options in (("ahead", Options(clock_s=HOUR)), ("behind", Options(clock_s=-HOUR)))
    ]
    async with chaos.client() as trainer:
        late = chaos.jobs(4, tokens=100_000, deadline_s=0.5)
        await trainer.submit([*chaos.jobs(40, n=2, tokens=60, deadline_s=40.0), *late])
        await trainer.take(chaos.rng.randint(1, 10))
        await chaos.died(chaos.rng.choice([ahead, behind]))
        taken = await trainer.take()
        expired = {one.job_id for one in taken if isinstance(one, JobFailure)}
        chaos.expect(expired <= {job.id for job in late}, "a job expired early")
    await _well_ended(chaos, *clients)


@scenario("rolling_upgrade", lossless=True)
async def rolling_upgrade(chaos: Chaos) -> None:
    """Workers and clients of a newer minor version, which write a field nobody here knows, beside those of today; and a
    client of the next major version, whose jobs are refused with a word that says so."""
    await chaos.worker(max_running=8, tokens_per_s=200)
    newer = Options(minor=MINOR + 1)
    clients = [await chaos.client_process(chaos.jobs(30, n=2), "newer", "newer", newer)]
    async with chaos.client() as trainer:
        await trainer.submit(chaos.jobs(30, n=2))
        await trainer.take(10)
        await chaos.worker(max_running=8, tokens_per_s=200, minor=MINOR + 1)
        await chaos.workers[0].drain(10)  # the old ones go, one by one
        await trainer.submit(chaos.jobs(30, n=2, tokens=30))
        async with chaos.broker() as broker:
            statuses = await broker.workers()
        chaos.expect([one.worker_id for one in statuses] == [chaos.workers[1].id], f"workers seen: {statuses}")
        taken = await trainer.take()
        chaos.expect(all(one.ok for one in taken), "a job failed in the upgrade")
    jobs = chaos.jobs(5)
    clients.append(await chaos.client_process(jobs, "next", "next", Options(major=MAJOR + 1)))
    await _well_ended(chaos, *clients)
    async with chaos.broker() as broker:
        found = await letters(broker)
    chaos.expect({one.job_id for one in found} == {job.id for job in jobs}, "the next version's jobs are not letters")
    chaos.expect(all(f"version {MAJOR + 1}.{MINOR}" in one.error for one in found), f"they say {found[:1]}")
