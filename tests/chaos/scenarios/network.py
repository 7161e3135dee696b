"""A network that holds things back, loses replies, or breaks connections."""

from __future__ import annotations

import asyncio
import time

from redis.exceptions import RedisError

from rolloutmq import GenerateJob
from rolloutmq.messages import Broker
from rolloutmq.messages.broker.command_channel import CommandSender
from rolloutmq.messages.model.base import MAX_TOKENS

from ..context import POOL, Chaos, Trainer, until
from ..looks import held, left, running, serving
from ..processes import WorkerProcess
from ..proxy import Direction, script_names
from ..scenario import scenario
from .gateways import GATEWAY

CUTS: dict[str, tuple[Direction, ...]] = {"up": ("up",), "down": ("down",), "both": ("up", "down")}


def _cut_worker(name: str, directions: tuple[Direction, ...]) -> None:
    @scenario(f"cut_worker_{name}")
    async def cut(chaos: Chaos) -> None:
        """A worker is cut off for longer than its lease, with jobs running and results on their way. What it had sent
        arrives when the cut is healed, long after others have its jobs."""
        proxy = await chaos.proxy()
        lonely = await chaos.worker(proxy.url, max_running=64, tokens_per_s=40)
        async with chaos.client() as trainer, chaos.broker() as broker:
            await trainer.submit(chaos.jobs(4, tokens=1))
            await trainer.take()  # the server knows every script from now on: what arrives late is not refused for that
            jobs = [chaos.job(n=4, tokens=chaos.rng.randint(40, 100)) for _ in range(24)]
            await trainer.submit(jobs)
            await running(broker, 16)
            others = await chaos.start_workers(1, max_running=96, tokens_per_s=25)
            before = lonely.id
            chaos.gone(lonely)
            proxy.cut(*directions)
            await until(lambda: left(broker, before), what="the lonely worker's lease to end")
            await until(lambda: _all_run_by(broker, others[0].id), what="others to run what it held")
            proxy.heal()
            await serving(broker, lonely)
            await trainer.take()
            await others[0].drain(10)
            await trainer.submit(chaos.jobs(8, tokens=5))
            taken = await trainer.take()
            chaos.expect({one.worker_id for one in taken} == {lonely.id}, "the worker that came back did not serve")


def _cut_client(name: str, directions: tuple[Direction, ...]) -> None:
    @scenario(f"cut_client_{name}")
    async def cut(chaos: Chaos) -> None:
        """A client is cut off while it submits and receives; it asks again until it knows."""
        proxy = await chaos.proxy()
        await chaos.worker(max_running=64, tokens_per_s=200)
        async with chaos.client(proxy.url) as trainer:
            await trainer.submit(chaos.jobs(20, n=2))
            await trainer.take(chaos.rng.randint(1, 20))
            proxy.cut(*directions)
            more = chaos.jobs(20, n=2)
            submitting = asyncio.create_task(submit_until_accepted(trainer, more))
            await asyncio.sleep(1.5)  # how long the network is cut
            proxy.heal()
            await submitting
            await trainer.take()
            chaos.expect(trainer.client.repeats == 0, f"{trainer.client.repeats} outcomes were delivered twice")


for _name, _directions in CUTS.items():
    _cut_worker(_name, _directions)
    _cut_client(_name, _directions)


async def submit_until_accepted(trainer: Trainer, jobs: list[GenerateJob]) -> None:
    """What a trainer does with an error it cannot interpret: the same jobs again."""
    while True:
        try:
            await trainer.submit(jobs)
        except (RedisError, OSError):
            await asyncio.sleep(0.1)
        else:
            return


async def _all_run_by(broker: Broker, worker_id: str) -> bool:
    count = len(await held(broker, worker_id))
    return bool(count) and (await broker.load()).open_jobs == count


@scenario("connections_break_all_the_time", lossless=True, lease_s=2.0)
async def flaky(chaos: Chaos) -> None:
    """Every connection of workers and client is broken again and again, at random moments."""
    near, far = await chaos.proxy(), await chaos.proxy()
    await chaos.start_workers(2, far.url, max_running=32, tokens_per_s=300)
    far.delay_s = 0.001

    async def breaking() -> None:
        while True:
            await asyncio.sleep(chaos.rng.uniform(0.03, 0.25))
            chaos.rng.choice((near, far, far)).close_all()

    async with chaos.client(near.url) as trainer:
        fault = asyncio.create_task(breaking())
        for _ in range(8):
            await submit_until_accepted(trainer, chaos.jobs(16, n=chaos.rng.randint(1, 4)))
            await trainer.take(10)
        fault.cancel()
        await trainer.take()


# --- one lost reply per command ---------------------------------------------------------------------------------------

OPERATORS = {"dead_page", "drop_letter", "requeue", "begin_again"}
OPERATORS |= {"audit_jobs", "audit_keys", "audit_members", "audit_totals"}
"""Scripts that neither a worker nor a trainer's client runs while a pool works."""
WEIGHTS = {"announce", "close", "learn", "report", "reserve"}
"""Scripts of weight transfers; `weights_under_fire` has those."""
PLAIN = {"XREAD", "BLPOP"}


@scenario("one_lost_reply_per_command", lossless=True, lease_s=2.0, timeout_s=120.0)
async def lost_replies(chaos: Chaos) -> None:
    """For each kind of command: it is executed, its reply is lost, the connection breaks, and it is sent again."""
    near, far = await chaos.proxy(), await chaos.proxy()
    kinds = sorted({f"EVALSHA {name}" for name in set(script_names()) - OPERATORS - WEIGHTS - GATEWAY} | PLAIN)
    chaos.rng.shuffle(kinds)
    missed: list[str] = []
    async with chaos.client(near.url) as trainer:
        worker = await chaos.worker(far.url, **QUICK)
        for kind in kinds:
            near.dropped, far.dropped = [], []
            near.drop_reply(kind)
            far.drop_reply(kind)
            for _ in range(4):
                worker = await _a_bit_of_everything(chaos, trainer, worker, far.url, kind == "EVALSHA overdue")
                if near.dropped or far.dropped:
                    break
            else:
                missed.append(kind)
    chaos.notes["commands"] = len(kinds)
    chaos.expect(not missed, f"no reply of {missed} was there to be lost")


QUICK = {"max_running": 16, "tokens_per_s": 1000.0, "checkpoint_s": 0.1, "drain_s": 2.2}


async def _a_bit_of_everything(
    chaos: Chaos, trainer: Trainer, worker: WorkerProcess, url: str, quiet: bool
) -> WorkerProcess:
    """Jobs that are done, expire, are refused, cancelled or stopped, a command, a worker that leaves amid long ones.

    quiet: the client has nothing to read for more than a second. Returns the worker that took over.
    """
    long, unwanted, enough = chaos.jobs(2, tokens=800), chaos.job(tokens=100_000), chaos.job(tokens=100_000)
    refused = chaos.jobs(2, tokens=MAX_TOKENS)  # longer than the engine's context
    mixed = [*long, unwanted, enough, *chaos.jobs(4, n=2, tokens=5), *refused]
    mixed += [chaos.job(tokens=100_000, deadline_s=0.3), chaos.job(min_version=99, deadline_s=2.5 if quiet else 0.2)]
    await submit_until_accepted(trainer, mixed)
    began = time.monotonic()
    await running(trainer.client.broker, 4)
    await trainer.client.cancel([unwanted.id])
    await trainer.client.broker.stop([enough.id])
    commands = CommandSender(trainer.client.broker.redis, POOL)
    await commands.send("version", timeout_s=5.0)
    await trainer.client.broker.cancel_client(trainer.client.client_id, chaos.job().id)
    await until(lambda: time.monotonic() - began > 0.3, what="long jobs to be well under way")
    away = asyncio.create_task(worker.drain(15))
    heir = await chaos.worker(url, **QUICK)
    await trainer.take()
    await away
    return heir
