"""What the kill matrix's trainers do, round by round: each kind of job, in each way of taking it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from rolloutmq import ChatMessage, JobFailed, SamplingParams
from rolloutmq.messages.ids import new_id
from rolloutmq.worker.scripted.engine import scripted_logprob

from .taker import STUCK_S, Taker, again

LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}},
}


async def plain(taker: Taker) -> None:
    """A loop over results; some jobs are cancelled, stopped, or have no time."""
    jobs = [taker.job(**({"deadline_s": 0.3} if taker.rng.random() < 0.1 else {})) for _ in range(8)]
    handles = await taker.submit(jobs)
    if taker.rng.random() < 0.3:
        unwanted = taker.rng.sample(handles, 2)
        await again(lambda: taker.client.cancel(unwanted))
    if taker.rng.random() < 0.3:
        await again(lambda: taker.client.broker.stop([taker.rng.choice(handles).job_id]))
    await taker.take_all()


async def groups(taker: Taker) -> None:
    """A loop over groups of several jobs."""
    names = [new_id() for _ in range(3)]
    await taker.submit([taker.job(group_id=name) for name in names for _ in range(taker.rng.randint(1, 3))])
    async for group in taker.client.groups(STUCK_S):
        taker.received((*group.results, *group.failures))


async def waits(taker: Taker) -> None:
    """Each job is waited for by itself."""
    handles = await taker.submit([taker.job() for _ in range(4)])

    async def one(handle: Any) -> None:
        ended = await again(lambda: taker.client.ending(handle, STUCK_S))
        taker.received((*ended.results, *ended.failures))

    await asyncio.gather(*map(one, handles))


async def tools(taker: Taker) -> None:
    """A conversation in which the model calls a tool."""
    messages = (ChatMessage(role="user", content="look"),)
    job = taker.job(token_ids=None, messages=messages, tools=(LOOK,), tool_parser="function", n=2)
    (handle,) = await taker.submit([job])
    ended = await again(lambda: taker.client.ending(handle, STUCK_S))
    for result in ended.results:
        called = [(call.name, call.arguments) for call in result.tool_calls]
        assert called == [("look", {"at": len(result.token_ids)})], called
    taker.received((*ended.results, *ended.failures))


async def batch(taker: Taker) -> None:
    """Many prompts in one call."""
    prompts = [[taker.rng.randrange(500)] for _ in range(6)]
    sampling = SamplingParams(max_new_tokens=taker.rng.choice((1, 20, 60)))
    for group in await taker.client.generate(prompts, sampling, n=2, timeout=STUCK_S):
        taker.received((*group.results, *group.failures))


async def stream(taker: Taker) -> None:
    """Tokens as they come: together they are the result."""
    shown: list[Any] = []
    try:
        async for delta in taker.client.stream(taker.job(n=1), timeout=STUCK_S):
            shown = [delta.token_ids] if delta.restarted else [*shown, delta.token_ids]
            if delta.result is not None:
                assert np.array_equal(np.concatenate(shown), delta.result.token_ids), "deltas are not the result"
                taker.received([delta.result])
    except JobFailed as failed:
        taker.received([failed.failure])


async def session(taker: Taker) -> None:
    """Turns of a conversation, the last one streamed."""
    talk = taker.client.session(token_ids=[taker.rng.randrange(500)])
    for turn in range(3):
        before = len(talk)
        try:
            if turn < 2:
                result = await talk.generate([1, 2], timeout=STUCK_S, sampling=SamplingParams(max_new_tokens=20))
            else:
                async for delta in talk.stream([3], timeout=STUCK_S, sampling=SamplingParams(max_new_tokens=40)):
                    result = delta.result
        except JobFailed as failed:
            taker.received([failed.failure])
            return
        taker.received([result])
        given = 2 if turn < 2 else 1
        assert np.array_equal(talk.token_ids[before + given :], result.token_ids), "the history is not what was said"


async def score(taker: Taker) -> None:
    """Log-probabilities of given continuations."""
    continuations = [[taker.rng.randrange(500) for _ in range(3)] for _ in range(4)]
    try:
        found = await taker.client.score([1, 2, 3], continuations, timeout=STUCK_S)
    except JobFailed as failed:
        taker.received([failed.failure])
        return
    for ids, result in zip(continuations, found, strict=True):
        assert np.allclose(result.logprobs, [scripted_logprob(token) for token in ids]), "scores of something else"
    taker.received(found)


Round = Callable[[Taker], Awaitable[None]]
ROUNDS: dict[str, tuple[Round, ...]] = {
    "results": (plain,),
    "groups": (groups,),
    "waits": (waits, tools),
    "batches": (batch, stream, session, score),
}
