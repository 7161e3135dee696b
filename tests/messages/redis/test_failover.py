"""A replica promoted by hand, behind an address that then leads to it; and a server that was demoted meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from support.pools.clients import arrived
from support.pools.pool import check_scripted, eventually, short_retries, worker
from support.redis.deployments import plain, replicated
from support.specimens.messages import job, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, RolloutResult
from rolloutmq.messages.errors import RedisUnavailable
from rolloutmq.messages.redis.connection import connect
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import ScriptedEngine

Pair = tuple[EmbeddedRedis, EmbeddedRedis]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with replicated(config={"replica-serve-stale-data": "no"}) as (primary, replica):
        yield primary, replica


class Address:
    """A service address as load balancers and DNS give one: new connections go to `leads_to`, old ones stay."""

    def __init__(self, leads_to: EmbeddedRedis) -> None:
        self.leads_to = leads_to
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Address:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.leads_to.port)
        except OSError:
            writer.close()
            return
        pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, back):
                end.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()


@pytest.fixture
async def address(pair: Pair) -> AsyncIterator[Address]:
    async with Address(pair[0]) as opened:
        yield opened


async def test_a_pool_goes_on_at_the_replica_that_was_promoted(pair: Pair, address: Address) -> None:
    """The old primary lives on as a replica, and its connections with it: READONLY is what sends everybody away."""
    primary, replica = pair
    jobs = [tokens(n=2) for _ in range(60)]
    async with (
        worker(address.url, engine=ScriptedEngine(tokens_per_s=20), max_running=8) as running,
        RolloutClient(address.url) as client,
    ):
        await client.submit_many(jobs)
        await eventually(lambda: arrived(client) >= 20)
        with plain(primary) as old, plain(replica) as new:
            # As it is done without loss: writes stop, the replica catches up, then it is promoted.
            old.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            await eventually(lambda: old.info("replication")["slave0"]["lag"] == 0 and _caught_up(old))
            new.replicaof("NO", "ONE")
            old.replicaof("127.0.0.1", replica.port)
            address.leads_to = replica
            old.execute_command("CLIENT", "UNPAUSE")
        results = [one async for one in client.results(30)]
        assert {(one.job_id, one.sample) for one in results if isinstance(one, RolloutResult)} == {
            (one.id, sample) for one in jobs for sample in (0, 1)
        }
        assert len(results) == 120
        for one in results:
            check_scripted(one, 3)
        assert running.status.refused_publishes == 0


def _caught_up(primary: object) -> bool:
    state = primary.info("replication")  # type: ignore[attr-defined]
    return bool(state["slave0"]["offset"] == state["master_repl_offset"])


async def test_a_demoted_server_is_left_for_the_new_primary(pair: Pair, address: Address) -> None:
    primary, replica = pair
    async with connect(address.url) as client, connect(address.url, blocking=True) as blocking:
        broker = Broker(client, "p")
        await broker.enqueue([job(reply_to="c")])
        popping = asyncio.create_task(blocking.blpop(["nothing"], timeout=20))
        with plain(primary) as old, plain(replica) as new:
            await eventually(lambda: old.info("clients")["blocked_clients"] == 1)
            new.replicaof("NO", "ONE")
            old.replicaof("127.0.0.1", replica.port)
        address.leads_to = replica
        one = job(reply_to="c")
        assert await broker.enqueue([one]) == ["new"]
        with plain(replica) as new:
            assert new.exists(broker.keys.job(one.id))
        # What waited there is thrown out, and waits at the new primary when it comes back.
        with pytest.raises(RedisUnavailable, match=r"UNBLOCKED|READONLY"):
            await popping
        popping = asyncio.create_task(blocking.blpop(["list"], timeout=20))
        await client.rpush("list", "x")
        assert await popping == [b"list", b"x"] or popping.result() == (b"list", b"x")


async def test_a_replica_that_has_lost_its_primary_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTERDOWN: promoted in time, the command gets through; if not, it is told what is wrong."""
    primary, replica = pair
    primary.kill()
    with plain(replica) as new:
        await eventually(lambda: new.info("replication")["master_link_status"] == "down")
        async with connect(replica.url) as client:
            accepting = asyncio.create_task(Broker(client, "p").enqueue([job(reply_to="c")]))
            await eventually(lambda: new.info("errorstats").get("errorstat_MASTERDOWN", {}).get("count", 0) >= 3)
            assert not accepting.done()
            new.replicaof("NO", "ONE")
            assert await accepting == ["new"]
        new.replicaof("127.0.0.1", primary.port)
        short_retries(monkeypatch)
        async with connect(replica.url) as client:
            with pytest.raises(RedisUnavailable, match="MASTERDOWN"):
                await Broker(client, "p").enqueue([job(reply_to="c")])


async def test_a_replica_that_nobody_promotes_is_told_as_such(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    async with connect(pair[1].url) as client:
        with pytest.raises(RedisUnavailable, match="READONLY"):
            await Broker(client, "p").enqueue([job(reply_to="c")])
