"""Kill, freeze and drain on real SGLang: the same three engines through all of it, on a CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.pools.worker_process import WorkerProcess as SGLangProcess

from rolloutmq import GenerateJob, SamplingParams
from rolloutmq.messages import Broker
from rolloutmq.ops.tiny_model import write_tiny_model

from ..context import POOL, Chaos, Trainer, until
from ..looks import held, left, part_of, running, serving
from ..oracle import Terms
from ..scenario import scenario

LEASE_S = 3.0
"""What tests/support/pools/worker_process.py gives its workers."""
PROMPT = 24
TIE = 1e-5
"""Log-probabilities that differ by less are equal, but for rounding in float32."""
DRAIN_S = 5
OPTIONS = ("--pool", POOL, "--dtype", "float32", "--max-running", "16", "--drain", str(DRAIN_S), "--checkpoint", "0.5")


class Served:
    """One `rolloutmq worker` with its engine's processes."""

    def __init__(self, process: SGLangProcess) -> None:
        self.process = process

    @property
    def id(self) -> str:
        return self.process.worker_id

    def signal(self, number: signal.Signals) -> None:
        """To the worker and everything it started."""
        os.killpg(self.process.process.pid, number)

    async def kill(self) -> None:
        await asyncio.to_thread(self.process.kill)


@scenario("sglang_kill_freeze_drain", lease_s=LEASE_S, slow=True, timeout_s=300.0)
async def sglang(chaos: Chaos) -> None:
    """SIGKILL, SIGSTOP past the lease and SIGTERM at five seconds, with generations under way each time. Greedy tokens
    are those of a run that nothing disturbed."""
    chaos.terms = Terms(scripted=False)
    model = chaos.directory / "model"
    await asyncio.to_thread(write_tiny_model, model, context=2048, dtype="float32")
    first, second, third = engines = await _start(chaos, model, 3)
    try:
        async with chaos.client(patience=90.0) as trainer, chaos.broker() as broker:
            await _kill(chaos, trainer, broker, first)
            await _freeze(chaos, trainer, broker, second)
            await _drain(chaos, trainer, broker, third)
        chaos.expect(await asyncio.to_thread(second.process.terminate, 20) == 0, "the last worker's exit code")
    finally:
        for engine in engines:
            await engine.kill()


async def _start(chaos: Chaos, model: Path, count: int) -> list[Served]:
    started = []
    for number in range(count):
        log = chaos.directory / f"sglang-{number}.log"
        process = await asyncio.to_thread(SGLangProcess, model, chaos.url, log, *OPTIONS, forked=False)
        chaos.ends_with(process.kill)  # also if another one does not join
        started.append(process)
    await asyncio.gather(*(asyncio.to_thread(process.wait_joined) for process in started))
    return [Served(process) for process in started]


def _greedy(chaos: Chaos, count: int, tokens: int) -> list[GenerateJob]:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    return [chaos.job(prompt=PROMPT, token_ids=_prompt(chaos), sampling=sampling) for _ in range(count)]


def _prompt(chaos: Chaos) -> list[int]:
    return [chaos.rng.randrange(3, 250) for _ in range(PROMPT)]


async def _kill(chaos: Chaos, trainer: Trainer, broker: Broker, victim: Served) -> None:
    await trainer.submit(_greedy(chaos, 40, 500))
    await running(broker, 36)
    await until(lambda: _saved(broker, victim.id), 30, "something to be saved")
    chaos.gone(victim)
    await victim.kill()
    await _same(chaos, trainer, await trainer.take(), "killed")


async def _freeze(chaos: Chaos, trainer: Trainer, broker: Broker, frozen: Served) -> None:
    before = frozen.id
    await trainer.submit(_greedy(chaos, 30, 200))
    await until(lambda: held(broker, before), 30, "the worker to hold jobs")
    chaos.gone(frozen)
    frozen.signal(signal.SIGSTOP)
    await until(lambda: left(broker, before), 30, "the frozen worker's lease to end")
    frozen.signal(signal.SIGCONT)
    taken = await trainer.take()
    await serving(broker, frozen, 30)
    await _same(chaos, trainer, taken, "frozen")


async def _drain(chaos: Chaos, trainer: Trainer, broker: Broker, leaving: Served) -> None:
    await trainer.submit(_greedy(chaos, 28, 1500))
    await until(lambda: held(broker, leaving.id), 30, "the worker to hold jobs")
    began, name = time.monotonic(), leaving.id
    exiting = asyncio.create_task(asyncio.to_thread(leaving.process.terminate, 30))
    await until(lambda: left(broker, name), 30, "the worker to leave the pool")
    left_s = time.monotonic() - began
    code = await exiting
    chaos.notes |= {"left_s": round(left_s, 2), "exited_s": round(time.monotonic() - began, 2)}
    chaos.expect(code == 0, f"the drained worker's exit code is {code}")
    chaos.expect(left_s <= DRAIN_S + 0.5, f"it left after {left_s:.2f} s, its budget was {DRAIN_S} s")
    taken = await trainer.take()
    chaos.notes["handed_back"] = sum(one.attempt > 1 for one in taken)
    chaos.expect(chaos.notes["handed_back"], "everything fitted into the budget: nothing was handed back")
    await _same(chaos, trainer, taken, "drained", most=4)


async def _same(chaos: Chaos, trainer: Trainer, taken: list[Any], what: str, most: int = 8) -> None:
    """What went through the fault has the tokens of a run without one."""
    moved = [one for one in taken if one.attempt > 1][:most]
    chaos.expect(moved, f"{what}: no job was run again")
    again = {fresh.id: one for fresh, one in zip(_greedy(chaos, len(moved), 1), moved, strict=True)}
    jobs = [
        GenerateJob(
            id=new_id,
            token_ids=chaos.prompts[one.job_id],
            sampling=SamplingParams(max_new_tokens=len(one.token_ids), temperature=0.0, ignore_eos=True),
        )
        for new_id, one in again.items()
    ]
    await trainer.submit(jobs)
    ties = 0
    for reference in await trainer.take():
        one = again[reference.job_id]
        if not np.array_equal(reference.token_ids, one.token_ids):
            at = int(np.argmax(reference.token_ids != one.token_ids))
            # Both are the likeliest after the same tokens. Rounding depends on the batch, and decides between equals.
            tie = abs(reference.logprobs[at] - one.logprobs[at]) < TIE
            ties += tie
            chaos.expect(tie, f"{what}: {one.job_id} differs from an undisturbed run at token {at}")
    chaos.expect(ties < max(2, len(moved)), f"{what}: none of {len(moved)} could be compared to its end")


async def _saved(broker: Broker, worker_id: str) -> bool:
    its = [(part_of(broker, job_id), job_id) for job_id in await held(broker, worker_id)]
    return any([await part.redis.hexists(part.keys.job(job_id), "kk") for part, job_id in its])
