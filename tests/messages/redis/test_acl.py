"""The users that docs/redis.md tells people to create: each can do its work to the end, and not the others'."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError
from support.pools.pool import dump, eventually, runs, status, worker
from support.redis.deployments import cluster, plain, replicated, sentinel
from support.redis.roles import FOR_REPLICAS, LINES, ONLY_OPERATORS, ROLES, create
from support.specimens.messages import SHORT, job, specimens, tokens
from support.specimens.turns import turn

from rolloutmq import JobFailed, JobFailure, RolloutClient
from rolloutmq.messages import Broker, Lease, WeightAnnouncement
from rolloutmq.messages.broker import RecordedSessions
from rolloutmq.messages.broker.command_channel import CommandSender
from rolloutmq.messages.broker.dead_letters import DeadLetters
from rolloutmq.messages.errors import RedisUnavailable
from rolloutmq.messages.redis.bell import Bell
from rolloutmq.messages.redis.connection import connect, ping
from rolloutmq.messages.scripts.source import LIBRARIES, script_path
from rolloutmq.ops.journal import live_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.status import pool_state
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.transfer.ledger import Ledger, VersionHolder
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine

Url = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as started:
        yield started


@pytest.fixture
def url(server: EmbeddedRedis) -> Url:
    """Makes the URL of a role's user, on an empty server that has never refused anything."""
    with plain(server) as admin:
        admin.flushall()
        admin.execute_command("ACL", "LOG", "RESET")

    def make(role: str, pool: str = "mine", more: str = "") -> str:
        return create(server, role, pool, more)

    return make


@pytest.fixture
async def admin(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url) as client:
        yield client


async def refusals(admin: redis.asyncio.Redis) -> list[str]:
    """What Redis refused to whom; redis-py's introduction of itself apart, which needs no permission to be refused."""
    log: list[Any] = await admin.execute_command("ACL", "LOG", 100)
    entries = [entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True)) for entry in log]
    told = [{_text(name): _text(value) for name, value in entry.items()} for entry in entries]
    return [f"{it['username']}: {it['reason']} {it['object']}" for it in told if not it["object"].startswith("client")]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- each can do its work --------------------------------------------------------------------------------------------


def test_the_docs_have_every_role() -> None:
    assert LINES.keys() == ROLES.keys()


@pytest.mark.parametrize("role", ROLES)
def test_no_script_can_be_refused_half_way(role: str) -> None:
    """Whatever branch it takes: all commands that stand in a role's scripts, and those of the shared functions that
    they call, are in its line."""
    allowed = set(re.findall(r"\+(\w+)(?!\|)\b", LINES[role]))
    shared = _functions("".join(script_path(library).read_text() for library in LIBRARIES))
    for name in ROLES[role]:
        text = script_path(name).read_text()
        needed = {command.lower() for command in _commands(_with_what_it_calls(text, shared))} | {"del", "exists"}
        if role in {"producer", "gateway"}:
            needed -= ONLY_OPERATORS
        assert needed <= allowed, f"{role} runs {name}"


def _commands(text: str) -> list[str]:
    """What is said first in each redis.call; one that is chosen on the spot counts as all it could be."""
    first = re.findall(r"redis\.p?call\(([^,)]*)", text)
    return [word for said in first for word in re.findall(r"'(\w+)'", said)]


def _functions(library: str) -> dict[str, str]:
    pieces = re.split(r"^local function (\w+)", library, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _with_what_it_calls(text: str, shared: dict[str, str]) -> str:
    reached, todo = "", [text]
    left = dict(shared)
    while todo:
        piece = todo.pop()
        reached += piece
        called = [name for name in left if re.search(rf"\b{name}\(", piece)]
        todo += [left.pop(name) for name in called]
    return reached


async def test_producer_and_worker_do_their_work(url: Url, admin: redis.asyncio.Redis) -> None:
    engine = ScriptedEngine(tokens_per_s=200)
    async with (
        worker(url("worker"), pool="mine", engine=engine, max_running=4) as running,
        RolloutClient(url("producer"), "mine") as client,
    ):
        await client.submit_many([tokens(n=2, priority=priority) for priority in ("high", "normal", "low")])
        assert len([one async for one in client.results(10)]) == 6
        queued = [await client.submit(tokens(min_version=9)) for _ in range(2)]
        running_long = await client.submit(token_ids=[1], sampling=SHORT.model_copy(update={"max_new_tokens": 2000}))
        in_group = await client.submit(tokens(min_version=9, group_id="g"))
        overdue = await client.submit(tokens(min_version=9, deadline_s=0.2))
        unreadable = await client.submit(text="no tokenizer here")
        await eventually(lambda: running.generation.running == 1)
        assert await client.cancel([queued[0], running_long]) == ["ok", "ok"]
        assert await client.cancel_group("g") == 1
        ended = {one.job_id: one.outcome async for one in _failures(client, 5)}
        assert ended[overdue.job_id] == "expired"
        assert ended[unreadable.job_id] == "dead"
        assert ended[queued[0].job_id] == ended[running_long.job_id] == ended[in_group.job_id] == "cancelled"
        assert await client.cancel_all() == 1
        assert (await client.load()).open_jobs == 0
        async with PoolControl(url("operator"), "mine") as control:
            assert (await control.version()).ok
            assert (await control.abort()).ok
        await client.broker.end_overdue()
        assert len([one async for one in client.map([tokens() for _ in range(5)], timeout=10)]) == 6
    assert await refusals(admin) == []


async def test_a_producer_records_and_takes_sessions(url: Url, admin: redis.asyncio.Redis) -> None:
    async with RolloutClient(url("producer"), "mine") as client:
        for name, idle_s in (("kept", 60.0), ("lost", 0.001)):
            await RecordedSessions(client.broker, idle_s).record("default", name, "k", turn([1], [2]))

        async def ended() -> bool:
            await client.broker.end_overdue()
            return [one.name async for one in client.sessions()] == ["kept"]

        await eventually(ended)
        assert len((await client.take_session("kept")).turns) == 1
        assert await client.forget_session("kept")
    assert await refusals(admin) == []


async def test_a_producer_streams_stops_and_asks_for_what_not_every_worker_can(
    url: Url, admin: redis.asyncio.Redis
) -> None:
    """Whether a worker can it may not see, so it hears that from the worker."""
    engine = ScriptedEngine(tokens_per_s=200)
    async with worker(url("worker"), pool="mine", engine=engine), RolloutClient(url("producer"), "mine") as client:
        assert [one async for one in client.stream(tokens(), timeout=10)][-1].result is not None
        long = tokens(sampling=SHORT.model_copy(update={"max_new_tokens": 2000}))
        handle = await client.submit(long)
        await eventually(lambda: runs(engine, 1))
        assert await client.stop([handle]) == 1
        assert (await client.wait(handle, 10))[0].finish_reason == "abort"
        with pytest.raises(JobFailed, match="seed: not supported"):
            await client.wait(await client.submit(tokens(seed=1)), 10)
    assert await refusals(admin) == ["producer-mine: command zrange"]


async def _failures(client: RolloutClient, count: int) -> AsyncIterator[JobFailure]:
    async for outcome in client.results(10):
        assert isinstance(outcome, JobFailure)
        yield outcome
        count -= 1
        if not count:
            return


async def test_a_workers_rarer_duties(url: Url, admin: redis.asyncio.Redis) -> None:
    """Jobs of dead workers, last chances, hand-backs, transfers of weights."""
    async with connect(url("worker")) as client, connect(url("worker"), blocking=True) as blocking:
        broker = Broker(admin, "mine")
        jobs = [job(reply_to="c", deadline_s=30.0) for _ in range(3)]
        await broker.enqueue(jobs)
        for attempt in range(4):
            lease = Lease(client, "mine", f"w{attempt}")
            await lease.join(status(f"w{attempt}"))
            await lease.claim(3, 3, 0)
            assert await lease.held() is not None
            await admin.zadd(broker.keys.workers, {f"w{attempt}": 1})
            await lease.reap(3)
        assert (await broker.load()).dead > 0
        last = Lease(client, "mine", "last")
        await last.join(status("last"))
        ledger, bell = Ledger(client, "mine"), Bell(blocking, "mine")
        await bell.open()
        await blocking.blpop([broker.keys.wake], timeout=0.1)
        announcement = _announcement()
        await Ledger(admin, "mine").announce(announcement)
        assert await ledger.announced(announcement.epoch) == announcement
        assert await ledger.heading() == (0, "", announcement.epoch)
        assert await ledger.goes_on(announcement)
        await ledger.report(announcement, "last", TransferReport(True, "done", holder="h:1"))
        assert (await ledger.heading())[:2] == (announcement.version, announcement.digest)
        here = VersionHolder(announcement.version, "h:1", announcement.token)
        assert await ledger.holders(announcement.version) == (None, [here])
        await ledger.holds("late", here)
        assert await ledger.adapter_holder("math") is None
        assert await ledger.adapters() == {}
        assert await last.leave() == len(await last.held())
    assert await refusals(admin) == []


def _announcement() -> WeightAnnouncement:
    announcement = specimens()["announcement"]
    assert isinstance(announcement, WeightAnnouncement)
    return announcement


async def test_a_publisher_does_its_work(url: Url, admin: redis.asyncio.Redis) -> None:
    async with connect(url("publisher")) as client, connect(url("publisher"), blocking=True) as blocking:
        ledger, bell, announcement = Ledger(client, "mine"), Bell(blocking, "mine"), _announcement()
        await ping(client)
        await bell.open()
        assert await ledger.new_epoch() == 1
        await ledger.live_workers()
        await ledger.announce(announcement)
        await ledger.epoch(announcement.epoch)
        here = VersionHolder(announcement.version, "h:1", announcement.token)
        await ledger.close(announcement, True, here, {})
        assert await ledger.committed() == announcement.version
        assert await ledger.version_state(announcement.version) == "committed"
        assert await blocking.xread({ledger.keys.bell: "0"}, block=10)
        await Ledger(admin, "mine").report(announcement, "w", TransferReport(True, "done"))
        assert await blocking.xread({ledger.keys.transfers: "0"}, block=10)
    assert await refusals(admin) == []


async def test_an_operator_does_its_work(url: Url, admin: redis.asyncio.Redis) -> None:
    broker = Broker(admin, "mine")
    doomed, lease = job(reply_to="c"), Lease(admin, "mine", "w")
    waiting = job(reply_to="c")
    await broker.enqueue([doomed, waiting, job(reply_to="d")])
    await lease.join(status("w"))
    (claim,) = await lease.claim(1, 1, 0)
    await lease.bury(claim.job_id, claim.attempt, "cause", "host", "error")
    operator = url("operator")
    assert (await pool_state(operator, "mine"))["ended"]["dead"] == 1
    async with connect(operator) as client:
        mine = Broker(client, "mine")
        letters = DeadLetters(mine)
        found = await live_of(mine, doomed.id)
        assert found.letter["cause"] == "cause"
        for state in ("queued", "running"):
            assert (found := await live_of(mine, waiting.id)) is not None
            assert found.state == state
            await lease.claim(2, 2, 0)
        (letter,) = await letters.page()
        await letters.requeue(letter.entry_id)
        assert await letters.count() == 0
        assert await mine.cancel_client("c") == 2
        assert len(await mine.cancel([doomed.id])) == 1
        await mine.end_overdue()
        sender = CommandSender(client, "mine")
        sent = await sender.send("version", timeout_s=0.1)
        assert sent.workers == ("w",)
        assert await sender.answers(sent) == {}
        assert await sender.gone(["w", "v"]) == {"v"}
        assert (await mine.unread()).keys() == {"c"}
        assert await mine.drop_replies("c") == 3
    assert await refusals(admin) == []


async def test_replicas_are_waited_for_with_three_commands_more() -> None:
    with replicated() as (primary, _):
        safe = create(primary, "producer", "mine", FOR_REPLICAS) + "?min_replicas=1"
        async with RolloutClient(safe, "mine") as client:
            assert (await client.submit(tokens())).state in {"new", "q"}
        async with RolloutClient(create(primary, "producer", "mine") + "?min_replicas=1", "mine") as client:
            with pytest.raises(NoPermissionError):
                await client.submit(tokens())


async def test_the_rest_of_the_table(url: Url, admin: redis.asyncio.Redis) -> None:
    lease = Lease(admin, "mine", "w")
    await lease.join(status("w"))
    commanding = "~rmq:{mine}:workers ~rmq:{mine}:command:* ~rmq:{mine}:answers:* +hlen +pexpire"
    async with RolloutClient(url("producer", more=commanding), "mine") as client:
        assert (await client.control.version(timeout=0.1))["w"].kind == "NoAnswer"
    named = url("producer", more="+select +client|setname").replace("/0", "/1?client_name=trainer")
    async with RolloutClient(named, "mine") as client:
        await client.submit(tokens())
    if (await admin.info("server"))["redis_version"] >= "7":
        async with RolloutClient(url("producer", more="+zrange %R~rmq:{mine}:worker*"), "mine") as client:
            assert [one.worker_id for one in await client.workers()] == ["w"]
            with pytest.raises(NoPermissionError):
                await Lease(client.broker.redis, "mine", "w").join(status("w"))
    assert await admin.zcard(lease.keys.workers) == 1


async def test_sentinels_and_clusters_need_what_the_docs_say() -> None:
    with replicated() as (primary, replica):
        for server in (primary, replica):
            create(server, "producer", "mine", "+role")
        with sentinel(primary) as port:
            async with RolloutClient(f"redis+sentinel://producer-mine:secret@127.0.0.1:{port}/main", "mine") as client:
                await client.submit(tokens())
    with cluster() as made:
        for server in made.nodes:
            create(server, "producer", "mine", "+cluster|slots")
        url = made.url.replace("//", "//producer-mine:secret@")
        async with RolloutClient(url, "mine") as client:
            await client.submit(tokens())


# --- and not the others' ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_nobody_reaches_another_pool_or_the_server(role: str, url: Url, admin: redis.asyncio.Redis) -> None:
    other = Broker(admin, "other")
    await other.enqueue([one := job(reply_to="c")])
    before = await dump(admin)
    key = other.keys.job(one.id)
    load = "rmq:{mine}:load"
    async with connect(url(role)) as client:
        for command in (
            ["FLUSHALL"], ["FLUSHDB"], ["CONFIG", "GET", "*"], ["CONFIG", "SET", "maxmemory", "1"], ["KEYS", "*"],
            ["SHUTDOWN", "NOSAVE"], ["ACL", "LIST"], ["CLIENT", "LIST"], ["MONITOR"], ["BGSAVE"],
            ["REPLICAOF", "h", "1"], ["SCRIPT", "FLUSH"], ["SWAPDB", "0", "1"], ["HGETALL", key], ["GET", "elsewhere"],
            ["DEL", key], ["EVAL", "return redis.call('HGETALL', KEYS[1])", "1", key],
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)
        # Nor by a script that does not say which keys it is about.
        sha = await client.script_load("return redis.call('HGETALL', ARGV[1])")
        with pytest.raises(NoPermissionError):
            await client.evalsha(sha, 1, load, key)
        sha = await client.script_load("return redis.call('FLUSHALL')")
        with pytest.raises(NoPermissionError):
            await client.evalsha(sha, 1, load)
        for attempt in (
            Broker(client, "other").enqueue([job(reply_to="c")]),
            Lease(client, "other", "w").claim(1, 1, 0),
        ):
            with pytest.raises(NoPermissionError):
                await attempt
    assert await dump(admin) == before


async def test_a_producer_cannot_be_a_worker_or_a_publisher(url: Url, admin: redis.asyncio.Redis) -> None:
    broker = Broker(admin, "mine")
    await broker.enqueue([job(reply_to="c")])
    real = Lease(admin, "mine", "real")
    await real.join(status("real"))
    before = await dump(admin)
    async with connect(url("producer")) as client:
        lease, ledger = Lease(client, "mine", "real"), Ledger(client, "mine")
        announcement = _announcement()
        for attempt in (
            lease.join(status("real")), lease.heartbeat(status("real")), lease.claim(1, 1, 0), lease.reap(3),
            lease.leave(), ledger.report(announcement, "real", TransferReport(True, "done")),
            ledger.holds("real", VersionHolder(1, "h:1", "t")), ledger.announce(announcement),
            ledger.close(announcement, True, None, {}), ledger.new_epoch(), Broker(client, "mine").workers(),
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await attempt
    assert await dump(admin) == before  # refused before anything was written


async def test_a_publisher_sees_no_job(url: Url, admin: redis.asyncio.Redis) -> None:
    broker = Broker(admin, "mine")
    await broker.enqueue([one := job(reply_to="c")])
    before = await dump(admin)
    async with connect(url("publisher")) as client:
        mine = Broker(client, "mine")
        for attempt in (
            client.hgetall(broker.keys.job(one.id)), mine.enqueue([job(reply_to="c")]), mine.cancel([one.id]),
            mine.read_replies("c", "0"), Lease(client, "mine", "w").claim(1, 1, 0),
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await attempt
    assert await dump(admin) == before


async def test_a_wrong_password_is_told_at_once(url: Url) -> None:
    async with connect(url("producer").replace("secret", "wrong")) as client:
        with pytest.raises(RedisUnavailable, match="refused these credentials") as caught:
            await ping(client)
        assert "wrong@" not in str(caught.value)
