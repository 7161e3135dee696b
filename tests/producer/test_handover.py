"""Nothing is acknowledged that the caller has not received, whatever is cancelled where, and all stays in reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived, waits
from support.pools.interrupts import interrupted_at
from support.pools.pool import eventually, stream_length, worker
from support.specimens.messages import tokens

from rolloutmq import BlockingRolloutClient, GenerateJob, PoolBusy, RolloutClient, RolloutResult, WaitTimeout
from rolloutmq.messages import Broker, Caps, WrongProcess
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.calls import generate

TICKS = 24
"""Turns of the event loop before a call is cancelled: the calls below need fewer to end when nothing is in the way."""


def samples(found: Any) -> set[tuple[str, int]]:
    """Job and sample of all results in whatever a call returned."""
    if isinstance(found, RolloutResult):
        return {(found.job_id, found.sample)}
    if isinstance(found, list | tuple):
        return set().union(*map(samples, found))
    return samples(found.results) if hasattr(found, "results") else set()


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@contextlib.contextmanager
def frozen(server: EmbeddedRedis) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


Call = Callable[[RolloutClient, list[GenerateJob]], Coroutine[Any, Any, Any]]


async def ask(client: RolloutClient, jobs: list[GenerateJob]) -> Any:
    return await client.wait((await client.submit_many(jobs))[0])


async def ask_ending(client: RolloutClient, jobs: list[GenerateJob]) -> Any:
    return await client.ending((await client.submit_many(jobs))[0])


async def ask_results(client: RolloutClient, jobs: list[GenerateJob]) -> Any:
    await client.submit_many(jobs)
    return await anext(client.results())


async def ask_groups(client: RolloutClient, jobs: list[GenerateJob]) -> Any:
    await client.submit_many(jobs)
    return await anext(client.groups())


async def ask_map(client: RolloutClient, jobs: list[GenerateJob]) -> Any:
    return await anext(client.map(jobs))


async def ask_generate(client: RolloutClient, jobs: list[GenerateJob]) -> Any:
    return await generate(client._core, jobs, None)


@pytest.mark.parametrize("call", [ask, ask_ending, ask_results, ask_groups, ask_map, ask_generate])
async def test_a_call_that_is_cancelled_anywhere_loses_nothing(redis_server: EmbeddedRedis, call: Call) -> None:
    """At every turn of the loop, before and after the first result is there, while Redis does not answer."""
    late = set[str]()  # jobs whose submission was cut off; it may still reach Redis
    async with worker(redis_server.url, max_running=32), RolloutClient(redis_server.url, client_id="client") as client:
        for turn in range(2 * TICKS):
            jobs = [tokens(n=2), tokens(n=2)]
            asked = asyncio.create_task(call(client, jobs))
            if turn >= TICKS:
                await eventually(lambda it=asked: arrived(client) or client._core.inbox._aside or it.done())
            await ticks(turn % TICKS)
            with frozen(redis_server):
                asked.cancel()
                await ticks(3)
                asked.cancel()  # whoever is in a hurry does it twice
                await ticks(3)
            await asyncio.wait([asked])
            received = samples(asked.result()) if not asked.cancelled() else set()
            await asyncio.gather(*client._core._finishing)
            expected = {(one.id, sample) for one in jobs for sample in range(2)}
            states = await client.cancel([one.id for one in jobs])  # what was not submitted, or is still open
            whole = {one.id for one, state in zip(jobs, states, strict=True) if state == "done"}
            rest = [one async for one in client.results(10)]
            while not received | samples(rest) >= {it for it in expected if it[0] in whole}:
                # A submission that was cut off, and accepted: its outcomes are expected once the first has arrived.
                await client._core.until(lambda: arrived(client) > 0, 10)
                rest += [one async for one in client.results(10)]
            left = samples(rest)
            assert not received & left, "each outcome once"
            late |= {one.id for one, state in zip(jobs, states, strict=True) if state == "unknown"}
            assert late.issuperset(client._core.inbox._jobs)
            assert client.repeats == 0
    async with RolloutClient(redis_server.url, client_id="client") as second:
        again = [one async for one in second.results(1) if one.job_id not in late]
    assert not again or call in (ask_results, ask_groups, ask_map), "a loop that was left keeps its last item"


@pytest.mark.parametrize("loop", ["results", "groups", "map"])
async def test_a_loop_goes_on_after_a_wait_that_was_cancelled(redis_db: str, client: RolloutClient, loop: str) -> None:
    jobs = [tokens(n=1) for _ in range(3)]
    if loop != "map":
        await client.submit_many(jobs)
    source: AsyncIterator[Any] = client.map(jobs) if loop == "map" else getattr(client, loop)()
    for _ in range(3):
        waiting = asyncio.ensure_future(anext(source))
        await eventually(lambda: waits(client))
        waiting.cancel()
        await asyncio.wait([waiting])
    async with worker(redis_db):
        assert samples([one async for one in source]) == {(one.id, 0) for one in jobs}


async def test_a_batch_that_was_cancelled_leaves_what_was_complete_and_no_failures(
    redis_db: str, client: RolloutClient, db: Redis, broker: Broker
) -> None:
    tracked = client._core.inbox.tracked
    async with worker(redis_db):
        for _ in range(3):
            good, never = [tokens(n=2) for _ in range(2)], tokens(min_version=9)
            asked = asyncio.create_task(generate(client._core, [*good, never], None))
            await eventually(lambda it=never.id: tracked(it))
            await eventually(lambda good=good: not any(tracked(one.id) for one in good))
            other = await client.submit(tokens(min_version=9))
            asked.cancel()
            await asyncio.wait([asked])
            assert await client.cancel([never.id, other]) == ["cancelled", "ok"]
            outcomes = [one async for one in client.results(10)]
            assert samples(outcomes) == {(one.id, sample) for one in good for sample in range(2)}
            assert [one.job_id for one in outcomes if not one.ok] == [other.job_id]
    await client.aclose()
    assert await stream_length(db, broker) == 0


async def test_a_batch_of_more_than_may_be_left_untaken_says_so(redis_db: str) -> None:
    caps = Caps(unread=4000)
    async with worker(redis_db), RolloutClient(redis_db, caps=caps, max_outstanding=4) as client:
        for _ in range(2):
            with pytest.raises(PoolBusy, match="take some first"):
                await generate(client._core, [tokens(n=4) for _ in range(20)], 10)
            found = [one async for one in client.results(10)]
            assert len(found) % 4 == 0
            assert found, "there is something to take"


@pytest.mark.parametrize("loop", ["results", "groups", "map"])
@pytest.mark.parametrize("owner", ["session", "generate", "stream"])
async def test_loops_do_not_wait_for_what_belongs_to_another_call(
    redis_db: str, client: RolloutClient, loop: str, owner: str
) -> None:
    """They end before it does, and are not kept by it when it ends."""

    def items(*jobs: GenerateJob) -> AsyncIterator[Any]:
        return client.map(jobs) if loop == "map" else getattr(client, loop)()

    async def own() -> Any:
        if owner == "session":
            return [await client.session(token_ids=[1]).generate([2])]
        if owner == "generate":
            return await client.generate([[1], [2]])
        return [delta.result async for delta in client.stream(tokens()) if delta.result is not None]

    owning = asyncio.create_task(own())
    await eventually(lambda: client._core.inbox.jobs)
    assert [one async for one in items()] == []
    mine = tokens(min_version=9)
    if loop != "map":
        await client.submit(mine)
    looping = asyncio.create_task(anext(aiter(items(mine))))
    await eventually(lambda: waits(client) == 2)
    async with worker(redis_db):
        assert len(samples(await owning)) >= 1
        assert not looping.done()
        await client.cancel([mine.id])
        assert (await looping) is not None


# --- Ctrl-C in a plain loop ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")
@pytest.mark.parametrize("call", ["wait", "generate", "results"])
def test_ctrl_c_loses_nothing_at_any_line(redis_db: str, serving_thread: None, call: str) -> None:
    line, done = 0, False
    while not done:
        line += 1
        with BlockingRolloutClient(redis_db, client_id="client") as client:
            found: Any = None
            handle = client.submit(tokens(n=2)) if call != "generate" else None
            if handle is not None:
                asyncio.run(eventually(lambda client=client: arrived(client) == 2))
            loop = client.results(10)
            act = {
                "wait": lambda client=client, handle=handle: client.wait(handle, 10),
                "generate": lambda client=client: client.generate([[1]], n=2, timeout=10),
                "results": lambda loop=loop: next(loop),
            }[call]
            try:
                with interrupted_at(line):
                    found = act()
                done = True
            except KeyboardInterrupt:
                pass
            gate = client._thread._gate
            with ThreadPoolExecutor(1) as other:  # which collects garbage, as any thread may
                assert other.submit(lambda gate=gate: gate.acquire(timeout=10) and not gate.release()).result()
            received = samples(found)
            rest = set[tuple[str, int]]()

            def nothing_left(client: BlockingRolloutClient = client, rest: set[Any] = rest) -> bool:
                rest.update(samples(list(client.results(10))))
                return client.outstanding == 0

            asyncio.run(eventually(nothing_left))
            assert not received & rest
            if call == "generate":
                assert len(received | rest) in ({2} if done else {0, 2})
            else:
                assert len(received | rest) == 2
            if call == "results" and done:
                assert list(loop) == []  # comes back
        with BlockingRolloutClient(redis_db, client_id="client") as second:
            assert list(second.results(1)) == []
    assert line > 5


@contextlib.contextmanager
def ctrl_c_when(condition: Callable[[], Any]) -> Iterator[None]:
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        asyncio.run(eventually(condition))
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    sender.join()


def test_ctrl_c_while_waiting(redis_db: str) -> None:
    with BlockingRolloutClient(redis_db) as client:
        handle = client.submit(tokens(min_version=9))
        with ctrl_c_when(lambda: waits(client)):
            client.wait(handle, 20)
        # nothing was lost by it: the job is still there, and the client still works
        assert client.outstanding == 1
        with pytest.raises(WaitTimeout):
            client.wait(handle, 0.05)
        loop = client.results()
        with ctrl_c_when(lambda: waits(client)):
            list(loop)
        assert client.cancel([handle]) == ["ok"]
        assert len(list(loop)) == 1, "the loop goes on"


# --- another process -------------------------------------------------------------------------------------------------


def in_a_child(act: Callable[[], object]) -> str:
    """What `act` raised in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
            os.write(write, b"nothing")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        said = told.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_is_told_to_make_its_own(redis_db: str) -> None:
    with BlockingRolloutClient(redis_db) as client:
        handle = client.submit(tokens(min_version=9))
        loop = client.results(1)
        for act in (lambda: client.wait(handle, 1), lambda: next(loop), client.load, lambda: client.submit(tokens())):
            assert in_a_child(act).startswith("WrongProcess: client client-"), act
        assert in_a_child(client.close) == in_a_child(loop.close) == "nothing"  # type: ignore[attr-defined]
        assert client.cancel([handle]) == ["ok"]
        assert len(list(client.results(5))) == 1


async def test_a_forked_child_of_an_asyncio_program_is_told_too(client: RolloutClient) -> None:
    handle = await client.submit(tokens(min_version=9))
    for act in (lambda: client.wait(handle, 1), lambda: anext(client.results(1)), client.load, client.cancel_all):
        said = await asyncio.to_thread(in_a_child, lambda act=act: asyncio.run(_awaited(act())))
        assert said.startswith(f"{WrongProcess.__name__}: "), said
    assert await client.cancel([handle]) == ["ok"]


async def _awaited(it: Any) -> Any:
    return await it
