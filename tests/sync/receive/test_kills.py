"""Deaths and stops through the whole pool, at every point of an update: nobody hangs, and nobody serves a mixture."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from support.peers import publishing
from support.peers.pool_members import BUCKET_BYTES, TrainerProcess, WorkerProcess, weights
from support.pools.pool import check_scripted, dump, eventually, replies, status, wait_replies
from support.specimens.messages import job

from rolloutmq import WeightPublisher
from rolloutmq.messages import Broker, Lease, RolloutResult, SamplingParams, WeightSyncError, connect
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.sync.publish.publisher import PublishReport
from rolloutmq.sync.tensors.digester import digest
from rolloutmq.sync.transfer.ledger import Ledger

NEVER_S = 600.0
JOIN_S = 3.0
TRANSFER_S = 3.0
TIMES = {"join_timeout_s": JOIN_S, "transfer_timeout_s": TRANSFER_S}
LASTING = {"load", "bell", "transfers", "weights", "holders", "dead", "needs", "turns:1"}
HOWS = ("SIGKILL", "SIGSTOP")
POINTS = ("announce", "join", "fetch", "verify", "load")
MODES: tuple[UpdateMode, ...] = ("resume", "in_place", "drain")
DIGESTS = {
    version: {name: digest(tensor) for name, tensor in weights(version).items()} if version else {}
    for version in range(6)
}


class Pool:
    """Workers on one Redis, and jobs that run all the while."""

    def __init__(self, url: str, broker: Broker) -> None:
        self.url, self.broker, self.ledger = url, broker, Ledger(broker.redis, "default")
        self.workers: list[WorkerProcess] = []
        self.trainers: list[TrainerProcess] = []
        self.jobs = 0

    async def add(self, count: int = 1, **config: Any) -> list[str]:
        """Workers, started at once and joined."""
        config = {"tokens_per_s": 300.0, "max_running": 4, "prefetch": 0} | config
        made = [WorkerProcess(self.url, **config) for _ in range(count)]
        self.workers += made
        return [await eventually(lambda one=one: one.status()["id"], 15.0, "a worker") for one in made]

    async def trainer(self, **settings: Any) -> TrainerProcess:
        """One that is connected."""
        made = TrainerProcess(self.url, **(TIMES | settings))
        self.trainers.append(made)
        assert await asyncio.to_thread(made.hear, 20.0) is not None
        return made

    async def end_lease(self, worker_id: str) -> bool:
        """As if this worker had been silent for so long. False if it has no lease."""
        return bool(await self.broker.redis.zadd(self.broker.keys.workers, {worker_id: 1}, xx=True, ch=True))

    async def enqueue(self, count: int = 4, tokens: int = 250) -> None:
        self.jobs += count
        sampling = SamplingParams(max_new_tokens=tokens)
        await self.broker.enqueue([job(sampling=sampling) for _ in range(count)])

    async def served(self, versions: set[int]) -> None:
        """One more job is done, and by one of these versions."""
        before = {reply.outcome.job_id for reply in await replies(self.broker)}
        await self.enqueue(1, 2)

        async def fresh() -> list[RolloutResult]:
            found = [reply.outcome for reply in await replies(self.broker)]
            done = [one for one in found if isinstance(one, RolloutResult) and len(one.token_ids) == 2]
            return [one for one in done if one.job_id not in before]

        (result,) = await eventually(fresh, 10.0, "a job to be served")
        assert set(result.versions) <= versions

    async def all_on(self, workers: list[WorkerProcess], version: int, timeout: float = 15.0) -> list[str]:
        """These serve exactly this version, bit by bit; their ids."""

        def there() -> bool:
            found = [one.status() for one in workers]
            for each in found:  # whole at every moment in which it would serve
                whole = each["digests"] == DIGESTS[each["version"]]
                assert whole or each["quarantined"] or each["updating"], each
            return all((each["version"], each["in_service"]) == (version, True) for each in found)

        await eventually(there, timeout, f"version {version} everywhere")
        return [one.status()["id"] for one in workers]

    async def check_results(self) -> None:
        """Every job is done once, and each of its tokens is of the version that its segment says."""
        for reply in await wait_replies(self.broker, self.jobs, timeout=30):
            check_scripted(reply.outcome, 3)
        await self.broker.ack("client", await replies(self.broker))

    async def close(self) -> None:
        """Everybody leaves; nothing stays."""
        living = [one for one in self.workers if one.process.is_alive()]
        for one in living:
            one.signal(signal.SIGCONT)
            one.say(leave=True)
        for one in living:
            await asyncio.to_thread(one.process.join, 15.0)
            assert one.process.exitcode == 0
        keys = await dump(self.broker.redis)
        for key in keys:
            name = key.removeprefix(self.broker.keys.prefix)
            assert await self.broker.redis.ttl(key) > 0 or name in LASTING, name
            assert not name.startswith(("worker:", "held:")), name
            assert name != "holders" or set(keys[key]) <= {b""}, "a worker that left offers nothing"

    def end(self) -> None:
        for one in (*self.workers, *self.trainers):
            one.end()


@asynccontextmanager
async def pool_of(url: str, count: int, **config: Any) -> AsyncIterator[Pool]:
    async with connect(url) as client:
        pool = Pool(url, Broker(client, "default"))
        try:
            await pool.add(count, **config)
            yield pool
            await pool.close()
        finally:
            pool.end()


publisher = partial(publishing.publisher, bucket_bytes=BUCKET_BYTES, **TIMES)


async def publish(source: WeightPublisher, version: int, timeout: float = 60.0) -> PublishReport:
    handle = source.publish(version, weights(version))
    return await asyncio.to_thread(handle.wait, timeout)


def cases(points: Sequence[str]) -> list[Any]:
    """Each point with both ways to fail, and each mode with both; of the two at a point one is slow."""
    return [
        pytest.param(at, MODES[i % 3], how, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for j, how in enumerate(HOWS)
        for i, at in enumerate(points)
    ]


@pytest.mark.parametrize(("at", "mode", "how"), cases(POINTS))
async def test_a_worker_dies_or_stops(redis_db: str, at: str, mode: UpdateMode, how: str) -> None:
    """No timeout tells, and no lease: a connection, or silence. Of one that never came its lease does."""
    patient = publisher(redis_db, mode=mode, **dict.fromkeys(TIMES, NEVER_S))
    async with pool_of(redis_db, 3) as pool, patient as source:
        assert (await publish(source, 1)).state == "committed"
        ids = await pool.all_on(pool.workers, 1)
        victim, *others = pool.workers
        await pool.enqueue()
        victim.fault(at, how, 2 if at == "fetch" else 1)
        reporting = asyncio.create_task(publish(source, 2))
        await eventually(lambda: victim.stopped or not victim.process.is_alive(), 20.0, "the fault")
        if at == "announce":
            assert await pool.end_lease(ids[0])
        report = await reporting
        assert (report.state, set(report.workers), set(report.failures)) == ("committed", set(ids[1:]), {ids[0]})
        said = "was lost" if at == "announce" or how == "SIGKILL" else "is stopped"
        assert report.failures[ids[0]].startswith(said)
        assert victim.stopped if how == "SIGSTOP" else not victim.process.is_alive()
        await pool.all_on(others, 2)
        await pool.served({2})
        assert (await publish(source, 3)).state == "committed"  # nor does the next one wait for it
        await pool.all_on(others, 3)
        await pool.end_lease(ids[0])
        if how == "SIGSTOP":
            await eventually(lambda: taken_back(pool, ids[0]))
            victim.signal(signal.SIGCONT)
            await pool.all_on(pool.workers, 3)  # as another worker, caught up
            assert (await publish(source, 4)).failures == {}
            await pool.all_on(pool.workers, 4)
        await pool.check_results()


async def taken_back(pool: Pool, worker_id: str) -> bool:
    """Whether somebody has taken back the jobs of a worker whose lease is over."""
    return await pool.broker.redis.zscore(pool.broker.keys.workers, worker_id) is None


async def epochs(pool: Pool) -> int:
    """How many transfers there were."""
    return int(await pool.broker.redis.hget(pool.broker.keys.weights, "epochs"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(("at", "mode", "how"), cases(["offer", "announce", "join", "amid", "commit"]))
async def test_the_trainer_dies_or_stops(redis_db: str, at: str, mode: UpdateMode, how: str) -> None:
    """Its successor's first version commits on every worker: no timeout of the successor's is waited for, and no
    transfer is repeated. A trainer that wakes up again moves nothing back."""
    port = free_port()
    async with pool_of(redis_db, 1) as pool:
        old = await pool.trainer(mode=mode, port=port)
        old.publish(1)
        assert (await asyncio.to_thread(old.report, 20.0)).state == "committed"
        await pool.add()
        ids = await pool.all_on(pool.workers, 1)
        await pool.enqueue()
        old.fault(at, how, 2 if at == "amid" else 1)
        old.publish(2)
        await eventually(lambda: old.stopped or not old.process.is_alive(), 10.0, "the trainer's end")
        await pool.served({1, 2})
        limits = dict.fromkeys(TIMES, NEVER_S)
        same = {"port": port} if how == "SIGKILL" else {}
        successor = await pool.trainer(mode=mode, **limits, **same)
        before = await epochs(pool)
        successor.publish(3)
        found = await asyncio.to_thread(successor.report, 60.0)
        assert (found.state, set(found.workers), found.failures) == ("committed", set(ids), {})
        assert await epochs(pool) == before + 1
        await pool.all_on(pool.workers, 3)
        await pool.served({3})
        if how == "SIGSTOP":
            old.signal(signal.SIGCONT)
            found = await asyncio.to_thread(old.report, 60.0)
            assert found is not None, "it waits for ever"
            served = isinstance(found, PublishReport) and found.state == "committed"
            assert served == (at == "commit"), found  # by then the workers had it
            assert await pool.ledger.committed() == 3
            await pool.all_on(pool.workers, 3)
            await pool.served({3})
        await pool.check_results()


async def test_a_worker_that_comes_during_a_transfer_takes_part(redis_db: str) -> None:
    patient = dict.fromkeys(TIMES, NEVER_S)
    async with pool_of(redis_db, 1) as pool, publisher(redis_db, **patient) as source:
        phantom = Lease(pool.broker.redis, "default", "phantom", lease_s=60.0)  # it is waited for
        await phantom.join(status("phantom"))
        handle = source.publish(1, weights(1))
        early = await asyncio.to_thread(handle.wait, 20, for_="committed")  # by the first one that has it
        assert early.workers == tuple(await pool.all_on(pool.workers, 1))
        assert await pool.ledger.committed() == 1
        await pool.add()
        ids = await pool.all_on(pool.workers, 1)
        assert not handle.done()
        assert await pool.end_lease("phantom")
        report = await asyncio.to_thread(handle.wait, 20)
        assert (report.state, set(report.workers)) == ("committed", set(ids))
        assert report.failures == {"phantom": "was lost: its lease is over"}
        await phantom.leave()


async def test_a_worker_that_was_stopped_for_a_while_comes_again_by_itself(redis_db: str) -> None:
    """With its lease: nobody waited for it, and it takes the newest version."""
    patient = dict.fromkeys(TIMES, NEVER_S)
    async with pool_of(redis_db, 2) as pool, publisher(redis_db, **patient) as source:
        assert (await publish(source, 1)).state == "committed"
        ids = await pool.all_on(pool.workers, 1)
        pool.workers[0].fault("fetch", "SIGSTOP", 2)
        report = await publish(source, 2)
        assert pool.workers[0].stopped
        assert (report.state, report.workers, set(report.failures)) == ("committed", (ids[1],), {ids[0]})
        assert (await publish(source, 3)).workers == (ids[1],)
        pool.workers[0].signal(signal.SIGCONT)
        assert await pool.all_on(pool.workers, 3) == ids
        assert (await publish(source, 4)).failures == {}


async def test_redis_dies_in_the_midst_of_a_transfer(tmp_path: Any) -> None:
    """The transfer goes on over it: the same one, in which both workers get the version."""
    durable = EmbeddedRedis(directory=tmp_path, appendonly=True, config={"appendfsync": "always"})
    patient = dict.fromkeys(TIMES, NEVER_S)
    with durable as server:
        async with pool_of(server.url, 2) as pool, publisher(server.url, **patient) as source:
            assert (await publish(source, 1)).state == "committed"
            ids, transfers = await pool.all_on(pool.workers, 1), await epochs(pool)
            victim = pool.workers[0]
            victim.fault("fetch", "hold", 2)
            handle = source.publish(2, weights(2))
            await eventually(lambda: victim.status()["holds"])
            server.kill()
            victim.let_go()
            await asyncio.to_thread(server.start)
            report = await asyncio.to_thread(handle.wait, 60)
            assert (report.state, set(report.workers), report.failures) == ("committed", set(ids), {})
            assert await epochs(pool) == transfers + 1
            await pool.all_on(pool.workers, 2)
            assert (await publish(source, 3)).state == "committed"
            await pool.all_on(pool.workers, 3)
            await pool.served({3})
            await pool.check_results()


async def test_two_publishers_at_once(redis_db: str) -> None:
    """Not meant to be; but whatever they do, versions go up, and everybody has one of them, whole."""
    async with pool_of(redis_db, 2) as pool, publisher(redis_db) as one, publisher(redis_db) as two:
        handles = [(1, one.publish(1, weights(1))), (2, two.publish(2, weights(2)))]
        for _, handle in handles:
            with contextlib.suppress(WeightSyncError):
                await asyncio.to_thread(handle.wait, 60)
        committed = await pool.ledger.committed()
        for each in [worker.status() for worker in pool.workers]:
            assert each["digests"] == DIGESTS[each["version"]] or each["updating"]
        assert (await publish(two, 3)).state == "committed"
        await pool.all_on(pool.workers, 3)
        assert committed < await pool.ledger.committed() == 3
        late = one.publish(4, weights(4))
        assert (await asyncio.to_thread(late.wait, 60)).state == "committed"
        await pool.all_on(pool.workers, 4)
