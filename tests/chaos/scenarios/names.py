"""One id for two things: a job's, a client's."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from rolloutmq import GenerateJob
from rolloutmq.messages import Broker, Keys
from rolloutmq.messages.errors import RolloutMQError

from .. import aof, journal, ledger
from ..context import POOL, Chaos, Trainer, until
from ..scenario import scenario


@scenario("a_job_id_that_is_taken", lossless=True)
async def job_ids(chaos: Chaos) -> None:
    """A job id that another client has open, and other content under an id that is open or has ended: refused where it
    is submitted, and whoever had the id first notices nothing."""
    await chaos.worker(max_running=16, tokens_per_s=100)
    async with chaos.client(client_id="first") as first, chaos.client(client_id="second", patience=5.0) as second:
        jobs = chaos.jobs(12, n=2, tokens=60)
        await first.submit(jobs)
        await _all_refused(chaos, jobs, first, second)
        await first.submit(jobs)  # the very same is no mistake
        own = chaos.jobs(12, tokens=5)
        await second.submit(own)
        taken = await asyncio.gather(first.take(), second.take())
        chaos.expect([len(one) for one in taken] == [24, 12], f"outcomes: {[len(one) for one in taken]}")
        await _all_refused(chaos, jobs, first, second)  # they have ended
        chaos.expect(first.client.outstanding + second.client.outstanding == 0, "something is waited for, for ever")


async def _all_refused(chaos: Chaos, jobs: Sequence[GenerateJob], first: Trainer, second: Trainer) -> None:
    for job in chaos.rng.sample(jobs, 6):
        await _refused(chaos, second, job, "another client's job id")
        other = job.model_copy(update={"token_ids": job.token_ids[::-1] + 1, "n": 3})  # type: ignore[index]
        await _refused(chaos, first, other, "other content under a known id")


async def _refused(chaos: Chaos, trainer: Trainer, job: GenerateJob, what: str) -> None:
    try:
        await trainer.client.submit(job)
    except RolloutMQError as error:
        chaos.expect(job.id in str(error), f"{what}: the error does not name the job: {error}")
        chaos.notes["refused_with"] = type(error).__name__
    else:
        chaos.expect(False, f"{what} was accepted")


@scenario("two_processes_with_one_client_id", lossless=True)
async def two_processes(chaos: Chaos) -> None:
    """The process that opens a client_id last takes over, while the first one stands still with outcomes that it has
    taken and not acknowledged. The first one is told. It hands out nothing that came later, and deletes nothing that
    the second one, whose network is slow, has not read."""
    await chaos.worker(max_running=16, tokens_per_s=200)
    proxy = await chaos.proxy()
    jobs = chaos.jobs(120, n=2, tokens=20)
    first = await chaos.client_process(jobs, "trainer", "first")
    await first.heard("taken", chaos.rng.randint(60, 120))
    first.signal(signal.SIGSTOP)
    async with chaos.broker() as broker:
        before = await _reader(broker)
        proxy.delay_s = 0.03
        second = await chaos.client_process(jobs, "trainer", "second", url=proxy.url)
        await until(lambda: _another(broker, before), what="the second process to open the client")
    first.signal(signal.SIGCONT)
    code = await first.ended(30)
    told = [str(text) for text in first.all("told")]
    chaos.expect(code == 3 and "ClientReplaced" in "".join(told), f"the first one was not told: {code}, {told}")
    proxy.delay_s = 0.0
    chaos.expect(await second.ended(30) == 0, "the second one did not end well")
    _each_in_the_right_hands(chaos)


async def _reader(broker: Broker) -> list[list[bytes]]:
    """Of each shard: who reads the client's reply stream."""
    found = [await part.redis.xrange(part.keys.reader("trainer")) for part in broker.parts]
    return [[entry for entry, _ in entries] for entries in found]


async def _another(broker: Broker, before: list[list[bytes]]) -> bool:
    return all(now not in (then, []) for now, then in zip(await _reader(broker), before, strict=True))


def _each_in_the_right_hands(chaos: Chaos) -> None:
    """What was acknowledged after the second one had opened, the second one had; what was published then, only it."""
    _, received = journal.read(chaos.directory / "journal")
    had = {run: {(got.job, got.sample) for got in received if got.run == run} for run in ("first", "second")}
    for shard, log in enumerate(chaos.logs):
        _judge_shard(chaos, ledger.tell(aof.read_commands(log), Keys(POOL, shard).prefix), had)
    chaos.notes["in_both_hands"] = len(had["first"] & had["second"])


def _judge_shard(chaos: Chaos, events: list[ledger.Event], had: dict[str, set[tuple[str, int]]]) -> None:
    opened = [event.seq for event in events if event.kind == "open"]
    chaos.expect(len(opened) == 2, f"the client was opened {len(opened)} times")
    published = {event.entry: event for event in events if event.kind == "publish"}
    for event in (event for event in events if event.seq > max(opened, default=0)):
        one = published.get(event.entry)
        sample = (one.job, one.sample) if one else ("", 0)
        if event.kind == "ack" and one:
            chaos.expect(sample in had["second"], f"{sample} was deleted, and the second process never had it")
        if event.kind == "publish":
            chaos.expect(sample not in had["first"], f"{sample} came to the first process, which was replaced")
