"""Faults drawn from a seed: what strikes whom, and after which step of the trainer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .world import LEASE_S, World, until


async def kill_worker(world: World, dice: random.Random) -> None:
    worker, _ = dice.choice(world.workers)
    await world.replace(worker)


async def freeze_worker(world: World, dice: random.Random) -> None:
    """For longer than its lease: others take its jobs, and then it wakes up."""
    worker, _ = dice.choice(world.workers)
    family = worker.family()
    for process in family:
        process.suspend()
    try:
        await asyncio.sleep(LEASE_S * dice.uniform(1.2, 2.0))  # how long it is frozen
    finally:
        for process in family:
            process.resume()


async def kill_engine(world: World, dice: random.Random) -> None:
    worker, _ = dice.choice(world.workers)
    world.scheduler_of(worker).kill()


async def restart_redis(world: World, dice: random.Random) -> None:
    await asyncio.to_thread(world.servers[0].restart)


async def slow_redis(world: World, dice: random.Random) -> None:
    world.proxy.delay_s = dice.uniform(0.02, 0.06)
    try:
        await asyncio.sleep(2.0)  # how long it is slow
    finally:
        world.proxy.delay_s = 0.0


async def fail_over(world: World, dice: random.Random) -> None:
    await asyncio.to_thread(world.fail_over)


async def late_worker(world: World, dice: random.Random) -> None:
    await world.add_worker()


async def spot_notice(world: World, dice: random.Random) -> None:
    worker, cloud = dice.choice(world.workers)
    cloud.notice()
    await until(lambda: worker.process.poll() is not None)
    await world.replace(worker)


async def kill_trainer(world: World, dice: random.Random) -> None:
    await asyncio.sleep(dice.uniform(0.0, 0.5))  # at any moment of a step
    if not world.over:
        await world.kill_trainer()
        await world.go_on()


FAULTS: tuple[Callable[[World, random.Random], Awaitable[None]], ...] = (
    kill_worker, freeze_worker, kill_engine, restart_redis, slow_redis, fail_over, late_worker, spot_notice,
    kill_trainer,
)  # fmt: skip
_BY_NAME = {fault.__name__: fault for fault in FAULTS}
NAMES = tuple(_BY_NAME)


@dataclass(frozen=True)
class Stroke:
    """A fault, and the step after which it comes."""

    step: int
    name: str


def drawn(seed: str, steps: int, names: tuple[str, ...] = NAMES) -> list[Stroke]:
    """Each of the faults once, at random steps in a random order; the trainer is killed twice."""
    dice = random.Random(seed)
    chosen = [*names, *(("kill_trainer",) if "kill_trainer" in names else ())]
    dice.shuffle(chosen)
    at = sorted(dice.sample(range(1, steps - 1), len(chosen)))
    return [Stroke(step, name) for step, name in zip(at, chosen, strict=True)]


async def strike(world: World, strokes: list[Stroke], seed: str) -> list[str]:
    """Do it all while the run goes on. Returns what struck and when."""
    dice, done = random.Random(f"{seed}/moments"), []
    for stroke in strokes:
        await world.reach(stroke.step)
        if world.over:
            done.append(f"{stroke.name}: the run was over")
            continue
        at = world.step
        await _BY_NAME[stroke.name](world, dice)
        done.append(f"{stroke.name} at step {at}")
    return done
