"""`?durable=disk`: what the server may lose when it is killed counts only once it is on its disk."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos.host import HostRedis
from support.pools.pool import dump, eventually, status, worker
from support.redis.deployments import plain, replicated
from support.redis.promises import promises
from support.redis.roles import FOR_DISK, create
from support.specimens.messages import job, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, NotOnDisk
from rolloutmq.messages.errors import ConfigError, RedisRefused
from rolloutmq.messages.redis import disk
from rolloutmq.messages.redis.connection import connect, ping
from rolloutmq.messages.redis.url import parse
from rolloutmq.messages.scripts import runner
from rolloutmq.ops.redis.embedded import EmbeddedRedis, find_server, server_version

HAS_WAITAOF = (server_version(find_server()) or (0, 0)) >= (7, 2)
only_where_it_is = pytest.mark.skipif(not HAS_WAITAOF, reason="this server has no WAITAOF")
only_where_it_is_not = pytest.mark.skipif(HAS_WAITAOF, reason="this server has WAITAOF")


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(appendonly=True) as started:
        yield started


@pytest.fixture
def url(server: EmbeddedRedis) -> str:
    return f"{server.url}?durable=disk"


@contextmanager
def held(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, budget_s: float = 0.0) -> Iterator[None]:
    """In this block the server writes its file but never flushes it, and callers have little patience."""
    with plain(server) as admin, monkeypatch.context() as patch:
        patch.setattr(runner, "RETRY_BUDGET_S", budget_s)
        admin.config_set("appendfsync", "no")
        yield
        admin.config_set("appendfsync", "always")


def test_the_level_is_read_from_every_url() -> None:
    for base in ("redis://h/0", "redis+sentinel://h/main", "redis+cluster://h", "unix:///s"):
        assert not parse(base).durability.waits
        assert not parse(f"{base}?durable=memory").durability.waits
        assert parse(f"{base}?durable=disk").durability.disk
        with pytest.raises(ConfigError, match="durable must be one of memory, disk"):
            connect(f"{base}?durable=always", pool="p")


async def test_what_returned_survives_a_killed_server(server: EmbeddedRedis, url: str) -> None:
    async with connect(url) as safe:
        broker, jobs = Broker(safe, "p"), [job(reply_to="c") for _ in range(20)]
        await ping(safe)
        for one in jobs:
            assert await broker.enqueue([one]) == ["new"]
        server.kill()
        await asyncio.to_thread(server.start)
        assert await broker.enqueue(jobs) == ["q"] * 20


async def test_a_restart_in_good_order_loses_nothing() -> None:
    with EmbeddedRedis(appendonly=True, config={"appendfsync": "everysec"}) as server:
        async with connect(server.url) as client:
            broker, jobs = Broker(client, "p"), [job(reply_to="c") for _ in range(20)]
            assert await broker.enqueue(jobs) == ["new"] * 20
            await asyncio.to_thread(server.restart)
            assert await broker.enqueue(jobs) == ["q"] * 20


@pytest.mark.skipif(shutil.which("cc") is None, reason="a slow disk needs a C compiler")
async def test_an_answer_under_always_comes_after_the_flush(tmp_path: Path) -> None:
    config = {"appendfsync": "always"}
    with HostRedis(tmp_path / "data", appendonly=True, config=config) as slow:
        async with connect(slow.url) as client:
            await Broker(client, "p").enqueue([job(reply_to="c")])  # scripts are loaded
            slow.flush_s = 0.3
            asked = time.monotonic()
            await Broker(client, "p").enqueue([job(reply_to="c")])
            assert time.monotonic() - asked >= 0.3
            slow.flush_s = 0


@only_where_it_is
@pytest.mark.skipif(shutil.which("cc") is None, reason="a slow disk needs a C compiler")
async def test_a_killed_server_with_a_slow_disk_loses_only_jobs_that_did_not_wait(tmp_path: Path) -> None:
    """`everysec` postpones a write while a flush is under way, and answers all the same."""

    async def submit(url: str, accepted: list[str]) -> None:
        async with connect(url) as client:
            while True:
                one = job(reply_to="c")
                await Broker(client, "p").enqueue([one])
                accepted.append(one.id)

    with HostRedis(tmp_path / "data", appendonly=True, config={"appendfsync": "everysec"}) as slow:
        safe, fast = list[str](), list[str]()
        submitting = [
            asyncio.create_task(submit(f"{slow.url}{query}", accepted))
            for query, accepted in (("?durable=disk", safe), ("", fast))
        ]
        await eventually(lambda: len(safe) > 2)
        slow.flush_s = 1.5
        with plain(slow) as admin:
            await eventually(lambda: admin.info("persistence")["aof_buffer_length"] > 20_000)  # of many jobs
            slow.kill()
        for task in submitting:
            task.cancel()
        await asyncio.gather(*submitting, return_exceptions=True)
        slow.flush_s = 0
        await asyncio.to_thread(slow.start)
        async with connect(slow.url) as client:
            known = (await Broker(client, "p").open_jobs("c")).keys()
    assert safe
    assert not set(safe) - known
    assert set(fast) - known, "the disk was not slow enough to show anything"


@only_where_it_is
async def test_each_promise_waits_for_the_disk(
    server: EmbeddedRedis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(url) as safe:
        made = await promises(safe)
        monkeypatch.setattr(disk, "FLUSH_TIMEOUT_MS", 20)
        with held(server, monkeypatch):
            await made.lease.heartbeat(status("w"))  # what need not survive goes on
            await made.ledger.announce(made.announcement)
            for promise in made.calls:
                with pytest.raises(NotOnDisk, match="not on its disk for certain"):
                    await promise()
            before = await dump(safe, skip=("bell", "wake", "mark"))
        for promise in made.calls:
            await promise()
        assert await dump(safe, skip=("bell", "wake", "mark")) == before  # the second time changed nothing


@only_where_it_is
async def test_a_disk_that_comes_back_in_time_is_waited_for(
    server: EmbeddedRedis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FLUSH_TIMEOUT_MS", 20)
    async with connect(url) as safe:
        with held(server, monkeypatch, budget_s=30.0), plain(server) as admin:
            accepting = asyncio.create_task(Broker(safe, "p").enqueue([job(reply_to="c")]))

            def waited_for() -> bool:
                return bool(admin.info("commandstats").get("cmdstat_waitaof", {}).get("calls", 0) >= 4)

            await eventually(waited_for)
            assert not accepting.done()
        assert await accepting in (["new"], ["q"])


async def test_a_call_without_it_does_not_wait(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect(server.url) as fast:
        with held(server, monkeypatch), plain(server) as admin:
            await ping(fast)
            assert await Broker(fast, "p").enqueue([job(reply_to="c")]) == ["new"]
            assert not {"cmdstat_waitaof", "cmdstat_wait", "cmdstat_eval"} & admin.info("commandstats").keys()


async def refused(settings: Mapping[str, str], *, appendonly: bool = True) -> str:
    """Why a server with these settings is refused, by a client, a ping and a call; nothing is written."""
    with EmbeddedRedis(appendonly=appendonly, config=settings) as server:
        url = f"{server.url}?durable=disk"
        async with connect(url) as safe:
            with pytest.raises(RedisRefused) as caught:
                await Broker(safe, "p").enqueue([job(reply_to="c")])
            assert caught.value.reason == "durable"
            with pytest.raises(RedisRefused):
                await ping(safe)
        with pytest.raises(RedisRefused, match=f"Redis at 127.0.0.1:{server.port}: durable=disk"):
            async with RolloutClient(url) as client:
                await client.submit(tokens())
        with plain(server) as admin:
            assert admin.dbsize() == 0
    return str(caught.value)


async def test_a_server_that_cannot_is_refused_before_anything_is_accepted() -> None:
    why = await refused({}, appendonly=False)
    assert "et `appendonly yes`" in why
    assert "leave ?durable= out" in why


@only_where_it_is_not
@pytest.mark.parametrize(
    "settings", [{"appendfsync": "everysec"}, {"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}]
)
async def test_an_older_server_has_to_flush_before_it_answers(settings: dict[str, str]) -> None:
    why = await refused(settings)
    assert "no WAITAOF. Use Redis 7.2 or newer, or Valkey, or set `appendonly yes`, `appendfsync always`" in why


async def test_a_server_that_stops_flushing_is_noticed(server: EmbeddedRedis, url: str) -> None:
    """Somebody changes its settings, or another server is there after a failover."""
    async with connect(url) as safe:
        broker = Broker(safe, "p")
        await broker.enqueue([job(reply_to="c")])
        with plain(server) as admin:
            admin.config_set("appendonly", "no")
            with pytest.raises(NotOnDisk, match=r"appendonly|flush"):
                await broker.enqueue([job(reply_to="c")])
            with pytest.raises(RedisRefused, match="appendonly yes"):
                await broker.enqueue([job(reply_to="c")])
            admin.config_set("appendonly", "yes")
            await eventually(lambda: not admin.info("persistence")["aof_rewrite_in_progress"])
        assert await broker.enqueue([job(reply_to="c")]) == ["new"]


@pytest.mark.parametrize("missing", ["waitaof" if HAS_WAITAOF else "config"])
async def test_a_user_that_may_not_ask_is_told_what_it_needs(server: EmbeddedRedis, missing: str) -> None:
    with plain(server) as admin:
        admin.execute_command("ACL", "SETUSER", "u", "on", ">x", "~*", "+@all", f"-{missing}")
    async with connect(f"redis://u:x@127.0.0.1:{server.port}/0?durable=disk") as safe:
        with pytest.raises(RedisRefused, match=rf"\+{missing}"):
            await ping(safe)


async def test_a_role_needs_these_commands_more(server: EmbeddedRedis) -> None:
    version = server_version(find_server()) or (0, 0)
    more = FOR_DISK[max(since for since in FOR_DISK if since <= version)]
    async with RolloutClient(create(server, "producer", "mine", more) + "?durable=disk", "mine") as client:
        assert (await client.submit(tokens())).state == "new"


async def test_disk_and_replicas_together() -> None:
    with replicated(config={"appendonly": "yes", "appendfsync": "always"}) as (primary, replica):
        async with connect(f"{primary.url}?durable=disk&min_replicas=1") as safe:
            one = job(reply_to="c")
            assert await Broker(safe, "p").enqueue([one]) in (["new"], ["q"])
            with plain(replica) as copy:
                assert copy.hget(Broker(safe, "p").keys.job(one.id), "st") == b"q"


async def test_a_pool_works_as_ever(url: str) -> None:
    async with worker(url, max_running=4) as running, RolloutClient(url) as client:
        await client.submit_many([tokens(n=2) for _ in range(20)])
        assert len([one async for one in client.results(30)]) == 40
        assert running.status.refused_publishes == 0


def test_the_embedded_server_flushes_before_it_answers() -> None:
    with EmbeddedRedis(appendonly=True) as server, plain(server) as admin:
        settings = admin.config_get("*append*")
        assert (settings["appendfsync"], settings["no-appendfsync-on-rewrite"]) == ("always", "no")
