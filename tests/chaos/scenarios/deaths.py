"""Workers that die or freeze."""

from __future__ import annotations

import signal
import time

from rolloutmq.messages import Broker

from ..context import Chaos, until
from ..looks import held, left, running, serving
from ..processes import WorkerProcess
from ..scenario import scenario

IN_FLIGHT = 512


@scenario("kill_worker_512_in_flight")
async def kill_worker(chaos: Chaos) -> None:
    """SIGKILL with 512 samples in the engine, and others of it published and not taken yet."""
    victim = await chaos.worker(max_running=IN_FLIGHT + 64, prefetch=0, tokens_per_s=20)
    async with chaos.client() as trainer, chaos.broker() as broker:
        short, long = chaos.jobs(16, n=4, tokens=4), chaos.jobs(IN_FLIGHT // 4, n=4, tokens=400)
        await trainer.submit(short + long)
        await running(broker, IN_FLIGHT // 4)
        await trainer.take(chaos.rng.randint(1, 64))
        heirs = await chaos.start_workers(2, max_running=IN_FLIGHT // 2, tokens_per_s=2000)
        await chaos.died(victim)
        taken = await trainer.take()
        by = {one.worker_id for one in taken if one.attempt == 2}
        chaos.expect(by and by <= {heir.id for heir in heirs}, f"second attempts ran on {by}")


@scenario("freeze_worker_past_lease", lease_s=0.6)
async def freeze_worker(chaos: Chaos) -> None:
    """SIGSTOP until others have its jobs, then SIGCONT. One worker notices by its own clock; the other does not look at
    its clock and publishes late, so that the script has to refuse it."""
    sleeper = await chaos.worker(max_running=64, tokens_per_s=10)
    walker = await chaos.worker(max_running=64, tokens_per_s=10, sleepwalk=True)
    async with chaos.client() as trainer, chaos.broker() as broker:
        await trainer.submit(chaos.jobs(24, n=4, tokens=12))
        await until(lambda: _held_by(broker, sleeper, walker), what="both to hold jobs")
        before = sleeper.id, walker.id
        chaos.gone(sleeper, walker)
        for frozen in (sleeper, walker):
            frozen.signal(signal.SIGSTOP)
        await chaos.start_workers(1, max_running=128, tokens_per_s=4)
        await until(lambda: _forgotten(broker, before), what="others to have the frozen workers' jobs")
        for frozen in (sleeper, walker):
            frozen.signal(signal.SIGCONT)
        await until(lambda: walker.refused, what="a late publish to be refused")
        for frozen in (sleeper, walker):
            await serving(broker, frozen)
        await trainer.submit(chaos.jobs(24, tokens=5))
        await trainer.take()
        chaos.notes["refused"] = sleeper.refused + walker.refused


@scenario("freeze_worker_within_lease", lossless=True, lease_s=2.0)
async def freeze_briefly(chaos: Chaos) -> None:
    """A pause shorter than the lease costs nothing: no job is claimed twice."""
    worker, _ = await chaos.start_workers(2, max_running=32, tokens_per_s=50)
    async with chaos.client() as trainer:
        await trainer.submit(chaos.jobs(32, n=2, tokens=30))
        await trainer.take(1)
        worker.signal(signal.SIGSTOP)
        await trainer.take(chaos.rng.randint(1, 8))
        worker.signal(signal.SIGCONT)
        taken = await trainer.take()
        chaos.expect(all(one.attempt == 1 for one in taken), "a job was claimed again")


@scenario("kill_late_in_a_long_generation", lease_s=0.6)
async def kill_late(chaos: Chaos) -> None:
    """What was checkpointed is continued: the death costs at most an interval, not the generation."""
    speed, every, samples, length = 200, 0.5, 16, 1000
    victim = await chaos.worker(max_running=32, tokens_per_s=speed, checkpoint_s=every)
    async with chaos.client() as trainer, chaos.broker() as broker:
        began = time.monotonic()
        await trainer.submit(chaos.jobs(samples, tokens=length))
        await running(broker, samples)
        await until(lambda: time.monotonic() - began > 3.0, what="three seconds of generation")
        heir = await chaos.worker(max_running=32, tokens_per_s=20 * speed, checkpoint_s=every)
        done = min(length, int((time.monotonic() - began) * speed))
        await chaos.died(victim)
        await trainer.take()
    await heir.drain(10)
    generated = await heir.heard("generated")
    wasted = (generated - (length - done) * samples) / samples / speed
    chaos.notes["wasted_s"] = round(wasted, 3)
    chaos.expect(wasted <= 2 * every, f"{wasted:.2f} s of each sample were generated again, saved every {every} s")


@scenario("moves_while_workers_die", timeout_s=90.0)
async def moves(chaos: Chaos) -> None:
    """Idle workers join, and are given work of those that run it. Givers and takers die or freeze in the middle."""
    options = {"max_running": 256, "tokens_per_s": 60, "checkpoint_s": 0.3, "max_lost": 100}
    workers = await chaos.start_workers(2, **options)
    async with chaos.client() as trainer, chaos.broker() as broker:
        for blow in ("die", "freeze", "die"):
            await trainer.submit(chaos.jobs(30, tokens=300) + chaos.jobs(15, n=2, tokens=300))
            await until(lambda: _all_run(broker), what="all to run")
            before = await _moved(broker)
            workers.append(await chaos.worker(**options))
            await until(lambda before=before: _has_moved(broker, before), what="a move")
            victim = chaos.rng.choice([one for one in workers if await held(broker, one.id)])
            workers.remove(victim)
            if blow == "die":
                await chaos.died(victim)
            else:
                chaos.gone(victim)
                victim.signal(signal.SIGSTOP)
                await until(lambda gone=victim.id: left(broker, gone), what="its lease to end")
                victim.signal(signal.SIGCONT)
                await serving(broker, victim)
        taken = await trainer.take()
        chaos.notes["moved"] = await _moved(broker)
        chaos.expect(any(len(one.legs) > 1 for one in taken), "nothing that was moved went on with its tokens")


async def _all_run(broker: Broker) -> bool:
    return sum((await broker.load()).queued) == 0


async def _moved(broker: Broker) -> int:
    return sum([int(await part.redis.hget(part.keys.load, "moved") or 0) for part in broker.parts])


async def _has_moved(broker: Broker, before: int) -> bool:
    return await _moved(broker) > before


async def _held_by(broker: Broker, *workers: WorkerProcess) -> bool:
    return all([await held(broker, one.id) for one in workers])


async def _forgotten(broker: Broker, ids: tuple[str, ...]) -> bool:
    return all([await left(broker, one) for one in ids])
