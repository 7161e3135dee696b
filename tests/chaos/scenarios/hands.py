"""What a call has taken and its caller has not: cancelled, timed out, interrupted with Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rolloutmq import SamplingParams, WaitTimeout

from ..context import Chaos, Trainer
from ..scenario import scenario

ROUNDS = 4
JOBS = 24


@scenario("cancelled_calls", lossless=True, lease_s=10.0)
async def cancelled(chaos: Chaos) -> None:
    """`wait`, `ending`, `results` and `groups` are cancelled at random moments, many of them while Redis stands still.
    Whoever was cancelled asks again, and in the end has everything."""
    await chaos.worker(max_running=256, tokens_per_s=200)
    freezing = asyncio.create_task(_freeze_again_and_again(chaos))
    async with (
        chaos.client(client_id="waiting") as waiting,
        chaos.client(client_id="iterating") as iterating,
        chaos.client(client_id="grouping") as grouping,
    ):
        for _ in range(ROUNDS):
            await asyncio.gather(
                _wait(chaos, waiting),
                _iterate(chaos, iterating, lambda: iterating.client.results(20)),
                _iterate(chaos, grouping, lambda: grouping.client.groups(20)),
            )
        freezing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await freezing


async def _freeze_again_and_again(chaos: Chaos) -> None:
    try:
        while True:
            await asyncio.sleep(chaos.rng.uniform(0.1, 0.4))
            os.kill(chaos.redis.pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)  # how long it is frozen
            os.kill(chaos.redis.pid, signal.SIGCONT)
    finally:
        os.kill(chaos.redis.pid, signal.SIGCONT)


async def _insist(chaos: Chaos, ask: Callable[[], Awaitable[Any]]) -> Any:
    """What `ask` returns when it is not cancelled; it is, a few times, and asked again."""
    for impatient in (True, True, True, False):
        asked = asyncio.ensure_future(ask())
        if impatient:
            await asyncio.wait({asked}, timeout=chaos.rng.uniform(0, 0.2))
            asked.cancel()
        try:
            return await asked
        except asyncio.CancelledError:
            chaos.notes["cancelled"] = chaos.notes.get("cancelled", 0) + 1
    return None


async def _wait(chaos: Chaos, trainer: Trainer) -> None:
    jobs = chaos.jobs(JOBS, n=2, tokens=chaos.rng.randint(1, 60))
    handles = await trainer.client.submit_many(jobs)
    trainer.accepted(jobs)

    async def one(place: int) -> None:
        handle = handles[place]
        if place % 2:
            trainer.received(await _insist(chaos, lambda: trainer.client.wait(handle, 20)))
        else:
            trainer.received((await _insist(chaos, lambda: trainer.client.ending(handle, 20))).results)

    await asyncio.gather(*(one(place) for place in range(JOBS)))


async def _iterate(chaos: Chaos, trainer: Trainer, iterate: Callable[[], Any]) -> None:
    await trainer.submit(chaos.jobs(JOBS, n=2, tokens=chaos.rng.randint(1, 60)))
    items = iterate()

    async def following() -> Any:
        nonlocal items
        try:
            return await anext(items, None)
        except asyncio.CancelledError:
            items = iterate()  # a generator ends with the cancellation of its anext
            raise

    while (item := await _insist(chaos, following)) is not None:
        trainer.received(getattr(item, "results", None) or [item])


@scenario("ctrl_c_in_a_plain_loop", lossless=True, lease_s=5.0)
async def interrupted(chaos: Chaos) -> None:
    """SIGINT again and again in a process with the blocking client: what was interrupted is asked for once more."""
    await chaos.worker(max_running=16, tokens_per_s=400)
    user = await chaos.blocking_process(chaos.jobs(240, n=2, tokens=12), "user")
    await user.heard("submitted")
    while user.alive and not user.all("finished"):
        user.signal(signal.SIGINT)
        await asyncio.sleep(chaos.rng.uniform(0.001, 0.02))  # how fast this user's fingers are
    code = await user.ended(30)
    chaos.expect(code == 0, f"exit code {code}")
    for trouble in user.all("trouble"):
        chaos.expect(False, trouble)
    chaos.notes["interrupted"] = sum(user.all("interrupted"))


@scenario("a_call_keeps_what_it_asked_for", lossless=True, timeout_s=90.0)
async def keeps(chaos: Chaos) -> None:
    """On one client: batches that are cancelled or time out, session turns, and a loop over results. The loop ends,
    and is told of no job that a batch cancelled; the client is free again after every batch that was given up."""
    await chaos.worker(max_running=64, tokens_per_s=200)
    chaos.terms = replace(chaos.terms, giving_up=frozenset({"trainer"}))
    async with chaos.client(max_outstanding=256, patience=10.0) as trainer:
        client = trainer.client
        session = client.session(token_ids=[1, 2, 3])
        long = asyncio.create_task(client.session(token_ids=[9]).generate(sampling=SamplingParams(max_new_tokens=2000)))
        await trainer.submit(chaos.jobs(8, tokens=10))
        await trainer.take()
        chaos.expect(not long.done(), "a loop over results waited for a session's turn")
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long
        for number in range(6):
            mine = chaos.jobs(8, n=2, tokens=10)
            batch = asyncio.create_task(_batch(chaos, trainer, 40 + 400 * (number % 2)))
            turn = asyncio.create_task(session.generate([7], sampling=SamplingParams(max_new_tokens=100)))
            await trainer.submit(mine)
            taken = await trainer.take()
            strangers = [one for one in taken if not one.ok and one.job_id not in {job.id for job in mine}]
            chaos.expect(not strangers, f"a loop over results got {len(strangers)} failures of a batch's jobs")
            await asyncio.sleep(chaos.rng.uniform(0, 0.3))  # the moment is the dice's
            batch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await batch
            trainer.received([await asyncio.wait_for(turn, 20)])
        await _free(chaos, trainer)


async def _batch(chaos: Chaos, trainer: Trainer, tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=tokens)
    prompts = [[place + 1, 2] for place in range(24)]
    with contextlib.suppress(WaitTimeout):
        groups = await trainer.client.generate(prompts, sampling, n=4, timeout=chaos.rng.uniform(0.05, 3))
        trainer.received(one for group in groups for one in (*group.results, *group.failures))


async def _free(chaos: Chaos, trainer: Trainer) -> None:
    """Nothing of the given up calls is left: the client may have as many samples outstanding as ever."""
    jobs = chaos.jobs(64, n=4, tokens=2)
    await trainer.submit(jobs)
    await trainer.take()
    left = trainer.client.outstanding
    chaos.expect(left == 0, f"{left} jobs are outstanding for ever")
