"""`rolloutmq journal record`: a pool's journal, written from outside. What it cannot read it counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError
from support.journals import Problems
from support.pools.pool import dump, eventually, replies, short_retries, worker
from support.redis.roles import create
from support.specimens.messages import SHORT, job, specimens, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, WeightAnnouncement, connect, encode
from rolloutmq.messages.journal import Entry, Journal, read
from rolloutmq.ops.journal import recorder as module
from rolloutmq.ops.journal import reply_streams
from rolloutmq.ops.journal.recorder import Recorder
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.sync.transfer.ledger import Ledger

Place = tuple[str, int]


@pytest.fixture
def announcement() -> WeightAnnouncement:
    found = specimens()["announcement"]
    assert isinstance(found, WeightAnnouncement)
    return found


@asynccontextmanager
async def recording(url: str, folder: Path, pool: str = "default", *, follow: bool = True) -> AsyncIterator[Recorder]:
    """A recorder on this event loop. Without `follow` it sees what is there when the block begins and when it ends."""
    async with connect(url) as redis:
        with Journal(folder) as journal:
            recorder = Recorder(redis, pool, journal, folder)
            await recorder.begin()
            running = asyncio.create_task(recorder.run()) if follow else None
            yield recorder
            if running is not None:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
            await recorder.finish()


def results(folder: Path) -> list[Place]:
    return sorted((entry.job_id, entry.sample) for entry in read(folder, events="result", on_problem=Problems()))


def lost(folder: Path) -> list[tuple[str, int, str]]:
    found = read(folder, events="lost")
    return [(entry.client_id, entry.data["entries"], entry.data["why"].split()[-1]) for entry in found]


def announced(folder: Path) -> list[Entry]:
    return list(read(folder, events="announcement", on_problem=Problems()))


async def on_the_stream(broker: Broker, client: str = "client") -> list[Place]:
    return sorted((one.outcome.job_id, getattr(one.outcome, "sample", -1)) for one in await replies(broker, client))


async def test_all_that_a_client_leaves_standing_is_written(
    redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    async with connect(redis_db) as redis:
        broker = Broker(redis, "default")
        jobs = [job(n=2, sampling=SHORT, group_id="g") for _ in range(3)]
        doomed = job(min_version=9)
        await broker.enqueue([*jobs, doomed])
        async with recording(redis_db, tmp_path) as recorder:
            async with worker(redis_db):
                await eventually(lambda: recorder.recorded.results == 6 and recorder._workers)
            await eventually(lambda: not recorder._workers)
            assert await broker.cancel([doomed.id]) == ["ok"]
            await eventually(lambda: recorder.recorded.failures == 1)
            before = await dump(redis)
        assert await dump(redis) == before
        stream = await replies(broker)
    entries = list(read(tmp_path))
    written = {(it.job_id, it.sample): it for it in entries if it.event == "result"}
    assert len(written) == len([it for it in entries if it.event == "result"]) == 6
    for one in stream[:6]:
        assert not hasattr(one.outcome, "cause")
        entry = written[one.outcome.job_id, one.outcome.sample]
        assert (entry.client_id, entry.group_id, entry.versions) == ("client", "g", (0,))
        assert entry.message == one.outcome
    (failure,) = (it for it in entries if it.event == "failure")
    assert (failure.job_id, failure.data["outcome"]) == (doomed.id, "cancelled")
    told = [it.message for it in entries if it.event == "job"]
    assert sorted(map(encode, filter(None, told))) == sorted(map(encode, [*jobs, doomed]))
    assert [it.data["what"] for it in entries if it.event == "worker"] == ["joined", "left"]
    assert lost(tmp_path) == []


@pytest.fixture
def counted_db(redis_db: str) -> str:
    """A server that counts what was added to a stream. The test below is about one that does not."""
    with Redis.from_url(redis_db) as db:
        if int(str(db.info("server")["redis_version"]).split(".", 1)[0]) < 7:
            pytest.skip("Redis 6.2 does not count")
    return redis_db


async def test_a_server_that_does_not_count_is_no_reason_to_say_less(
    redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = reply_streams._Count
    monkeypatch.setattr(reply_streams, "_Count", lambda length, added, first, last: count(length, None, first, last))
    async with connect(redis_db) as redis, worker(redis_db):
        broker = Broker(redis, "default")
        await publish(broker, 5, 3)
        async with recording(redis_db, tmp_path, follow=False) as recorder:
            assert (recorder.recorded.results, recorder.recorded.before, recorder.recorded.at_least) == (2, 0, False)
            await publish(broker, 2, 2, "new")
        assert (recorder.recorded.results, recorder.recorded.missed, recorder.recorded.at_least) == (2, 1, True)
    (told,) = read(tmp_path, events="lost")
    assert (told.client_id, told.data["entries"], told.data["at_least"]) == ("new", 1, True)


async def test_a_client_that_acknowledges_at_once_loses_nothing_silently(counted_db: str, tmp_path: Path) -> None:
    """Which of the two comes first nobody knows; together they are all results."""
    async with (
        recording(counted_db, tmp_path) as recorder,
        worker(counted_db),
        RolloutClient(counted_db, client_id="fast") as client,
    ):
        done = [one async for one in client.map([tokens(n=2) for _ in range(40)], timeout=60)]
    assert len(done) == 80
    written = results(tmp_path)
    assert len(written) == len(set(written)) == recorder.recorded.results
    assert set(written) <= {(one.job_id, one.sample) for one in done}
    assert recorder.recorded.results + recorder.recorded.missed == 80
    assert sum(count for _, count, _ in lost(tmp_path)) == recorder.recorded.missed


async def publish(broker: Broker, count: int, acknowledged: int, client: str = "client") -> None:
    """A worker publishes results, and the client acknowledges some of them."""
    standing = await broker.count_replies(client)
    await broker.enqueue([job(sampling=SHORT, reply_to=client) for _ in range(count)])
    await eventually(lambda: _is(broker.count_replies(client), standing + count))
    await broker.ack(client, (await replies(broker, client))[standing:][:acknowledged])


async def test_what_was_acknowledged_before_it_was_read_is_counted(counted_db: str, tmp_path: Path) -> None:
    async with connect(counted_db) as redis, worker(counted_db):
        broker = Broker(redis, "default")
        await publish(broker, 5, 3)
        async with recording(counted_db, tmp_path, follow=False) as recorder:
            assert (recorder.recorded.results, recorder.recorded.before) == (2, 3)
            await publish(broker, 4, 1)
            await publish(broker, 2, 2, "new")
        assert (recorder.recorded.results, recorder.recorded.missed) == (5, 3)
        assert results(tmp_path) == await on_the_stream(broker)
    assert sorted(lost(tmp_path)) == [("client", 1, "it"), ("client", 3, "began"), ("new", 2, "it")]


async def test_a_stream_that_is_deleted_and_begins_anew_is_counted_anew(counted_db: str, tmp_path: Path) -> None:
    async with connect(counted_db) as redis, worker(counted_db):
        broker = Broker(redis, "default")
        await publish(broker, 5, 0)
        async with recording(counted_db, tmp_path, follow=False) as recorder:
            await redis.delete(broker.keys.reply("client"))
            await publish(broker, 2, 0)
            await recorder.finish()
            assert (recorder.recorded.results, recorder.recorded.missed) == (7, 0)
            await publish(broker, 3, 3)
            await recorder.finish()
            assert recorder.recorded.missed == 3
            await redis.delete(broker.keys.reply("client"))
            await recorder.finish()
            await publish(broker, 2, 1)
        assert (recorder.recorded.results, recorder.recorded.missed) == (8, 4)


async def _is(value: Any, wanted: int) -> bool:
    return bool(await value == wanted)


@contextmanager
def program(url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`rolloutmq journal record` as a process of its own."""
    command = [sys.executable, "-m", "rolloutmq.ops.entry", "journal", "record", str(folder), "--redis", url, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_killed_recorder_is_followed_by_another(redis_db: str, tmp_path: Path) -> None:
    """Each result that stands on a stream is in the journal, once."""
    folder = tmp_path / "journal"
    async with connect(redis_db) as redis, worker(redis_db):
        broker = Broker(redis, "default")
        await broker.enqueue([job(n=2, sampling=SHORT) for _ in range(10)])
        with program(redis_db, folder):
            await eventually(lambda: folder.is_dir() and len(results(folder)) == 20)
            await broker.enqueue([job(n=2, sampling=SHORT) for _ in range(10)])
            await eventually(lambda: _is(broker.count_replies("client"), 40))
        assert set(results(folder)) <= set(await on_the_stream(broker))
        with program(redis_db, folder) as second:
            await eventually(lambda: len(results(folder)) == 40)
            second.send_signal(signal.SIGTERM)
            out, _ = await asyncio.to_thread(second.communicate)
        assert second.returncode == 0
        told = json.loads(out)
        assert (told["results"] <= 20, told["missed"], told["before"]) == (True, 0, 0)
        assert results(folder) == await on_the_stream(broker)
    problems = Problems()
    list(read(folder, on_problem=problems))
    assert len(problems) <= 1  # the torn end of the first one


async def test_redis_goes_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    with EmbeddedRedis(appendonly=True) as server:
        async with recording(server.url, tmp_path) as recorder:
            for number in (1, 2):
                async with connect(server.url) as redis, worker(server.url):
                    await Broker(redis, "default").enqueue([job(sampling=SHORT)])
                    await eventually(lambda number=number: recorder.recorded.results == number)
                if number == 1:
                    server.kill()
                    server.restart()
        assert (recorder.recorded.missed, recorder.recorded.before) == (0, 0)
    assert len(set(results(tmp_path))) == len(results(tmp_path)) == 2


async def test_what_is_damaged_or_newer_stops_nothing(
    redis_db: str, tmp_path: Path, announcement: WeightAnnouncement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    async with connect(redis_db) as redis:
        broker = Broker(redis, "default")
        keys = broker.keys
        await redis.set(keys.reply("no-stream"), "x")
        await redis.set(keys.job("b" * 32), "x")
        for name in ("a", "b"):
            await redis.xadd(keys.reply("client"), {"j": name * 32, "s": "1", "m": bytes([99, 0, 2, 0]), "l": "1"})
        await redis.xadd(keys.reply("client"), {"nothing": "known"})
        await redis.xadd(keys.reply("replaced"), {"j": "c" * 32, "o": "dead"})
        async with recording(redis_db, tmp_path) as recorder, worker(redis_db):
            assert (recorder.recorded.results, recorder.recorded.failures) == (2, 2)
            await redis.set(keys.epoch(1), "x")
            for epoch in ("9" * 30, "1", "x"):
                await redis.xadd(keys.bell, {"kind": "weights", "epoch": epoch})
            await Ledger(redis, "default").announce(announcement.model_copy(update={"epoch": 2}))
            await eventually(lambda: announced(tmp_path))
            await redis.set(keys.reply("replaced"), "x")
            await redis.set(keys.reply("later"), "x")
            await redis.hset(keys.unread, "later", "1")
            await broker.enqueue([one := job(sampling=SHORT)])
            await eventually(lambda: recorder.recorded.results == 3)
    newer = [entry for entry in read(tmp_path, events="result") if entry.job_id != one.id]
    assert [(entry.job_id[0], entry.sample, entry.content) for entry in newer] == [
        ("a", 1, bytes([99, 0, 2, 0])),
        ("b", 1, bytes([99, 0, 2, 0])),
    ]


async def test_an_announcement_is_written_once(
    redis_db: str, tmp_path: Path, announcement: WeightAnnouncement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    async with connect(redis_db) as redis, recording(redis_db, tmp_path):
        ledger = Ledger(redis, "default")
        await ledger.announce(announcement)
        await eventually(lambda: announced(tmp_path))
        await ledger.close(announcement, True, None, {})
    (entry,) = announced(tmp_path)
    assert entry.versions == (announcement.version,)
    assert isinstance(entry.message, WeightAnnouncement)


async def test_its_user_reads_and_cannot_write(
    redis_server: EmbeddedRedis, tmp_path: Path, announcement: WeightAnnouncement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    url = create(redis_server, "recorder", "mine")
    async with connect(redis_server.url) as admin, connect(url) as client:
        broker, mine = Broker(admin, "mine"), Broker(client, "mine")
        async with recording(url, tmp_path, "mine") as recorder:
            async with worker(redis_server.url, pool="mine"):
                await broker.enqueue([job(sampling=SHORT) for _ in range(2)])
                await eventually(lambda: recorder.recorded.results == 2 and recorder._workers)
            await Ledger(admin, "mine").announce(announcement)
            await eventually(lambda: announced(tmp_path))
        refused = [
            dict(zip(entry[::2], entry[1::2], strict=True)) for entry in await admin.execute_command("ACL", "LOG")
        ]
        assert [entry for entry in refused if not entry[b"object"].startswith(b"client")] == []
        before = await dump(admin)
        for attempt in (
            mine.ack("client", [(await replies(broker))[0]]), mine.enqueue([job()]), mine.cancel(["a" * 32]),
            client.xdel(broker.keys.reply("client"), "1-1"), client.hset(broker.keys.load, "jobs", "1"),
            client.delete(broker.keys.load),
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await attempt
        assert await dump(admin) == before
