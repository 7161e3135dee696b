"""The client of a plain training loop: the same promises without asyncio, from any thread, through Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from support.pools.clients import waits
from support.pools.pool import eventually, short_retries
from support.specimens.messages import SHORT, tokens

from rolloutmq import BlockingRolloutClient, InvalidField, JobFailed, RedisUnavailable, RolloutMQError, WaitTimeout
from rolloutmq.messages import Keys


def stream_length(url: str, client_id: str) -> int:
    with redis.Redis.from_url(url) as db:
        return int(db.xlen(Keys("default").reply(client_id)))


@pytest.mark.one_shard
def test_the_whole_face(redis_db: str, serving_thread: None) -> None:
    with BlockingRolloutClient(redis_db, client_id="blocking") as client:
        assert client.client_id == "blocking"
        assert [one.sample for one in client.wait(client.submit(token_ids=[1], n=3, sampling=SHORT), 10)] == [0, 1, 2]
        client.submit_many([tokens(), tokens()])
        assert client.outstanding == 2
        assert len(list(client.results(10))) == 2
        client.submit_many([tokens(group_id="g"), tokens(group_id="g")])
        assert [len(group.results) for group in client.groups(10)] == [2]
        assert len(list(client.map((tokens() for _ in range(30)), window=4, timeout=10))) == 30
        handle = client.submit(tokens(min_version=9, group_id="later"))
        assert client.load().open_jobs == 1
        assert len(client.workers()) == 1
        assert client.cancel([handle]) == ["ok"]
        with pytest.raises(JobFailed, match="cancelled"):
            client.wait(handle, 5)
        client.submit(tokens(min_version=9, group_id="later"))
        assert client.cancel_group("later") == 1
        assert len(list(client.results(5))) == 1
        with pytest.raises(InvalidField, match="token_ids"):
            client.submit(token_ids=[-1])
    assert stream_length(redis_db, "blocking") == 0


@pytest.mark.one_shard
def test_a_loop_left_early_keeps_the_rest(redis_db: str, serving_thread: None) -> None:
    with BlockingRolloutClient(redis_db, client_id="blocking") as client:
        client.submit_many([tokens() for _ in range(5)])
        for _ in client.results(10):
            break
        for _ in client.groups(10):
            break
        loop = client.results(10)
        next(loop)
        loop.close()
        assert client.outstanding == 2
        assert len(list(client.results(10))) == 2
    assert stream_length(redis_db, "blocking") == 0  # each loop was followed by another one


@pytest.mark.one_shard
def test_closed_with_a_loop_still_open(redis_db: str, serving_thread: None) -> None:
    client = BlockingRolloutClient(redis_db, client_id="blocking")
    client.submit_many([tokens() for _ in range(3)])
    loop = client.results(10)
    next(loop)
    client.close()
    client.close()
    loop.close()
    assert stream_length(redis_db, "blocking") == 3  # what was never taken stays, and what was not finished with


def test_from_several_threads(redis_db: str, serving_thread: None) -> None:
    with BlockingRolloutClient(redis_db) as client, ThreadPoolExecutor(8) as threads:

        def rollouts(_: int) -> int:
            return sum(len(client.wait(client.submit(tokens(n=2)), 20)) for _ in range(5))

        assert sum(threads.map(rollouts, range(8))) == 80
        assert client.outstanding == 0


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    before = threading.active_count()
    with pytest.raises(RedisUnavailable):
        BlockingRolloutClient("redis://127.0.0.1:1/0")
    assert threading.active_count() == before


def test_closing_ends_the_waits_of_other_threads(redis_db: str) -> None:
    client = BlockingRolloutClient(redis_db)
    handle = client.submit(tokens(min_version=9))
    calls = [lambda: client.wait(handle), lambda: list(client.results()), lambda: list(client.groups())]
    with ThreadPoolExecutor(3) as threads:
        ending = [threads.submit(call) for call in calls]
        asyncio.run(eventually(lambda: waits(client) == 3))
        client.close()
        for one in ending:
            with pytest.raises(RolloutMQError, match="is closed"):
                one.result(10)


def test_closing_ends_a_call_that_redis_does_not_answer(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = BlockingRolloutClient(redis_db)
    asked = threading.Event()

    async def silent() -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client._it.broker, "load", silent)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.load)
        assert asked.wait(10)
        client.close()
        with pytest.raises(RolloutMQError, match="is closed"):
            call.result(10)


def test_an_iterator_collected_in_the_thread_of_the_client(redis_db: str, serving_thread: None) -> None:
    with BlockingRolloutClient(redis_db) as client:
        client.submit_many([tokens(), tokens()])
        loops = [client.results(10)]
        next(loops[0])
        client._thread.loop.call_soon_threadsafe(loops.clear)  # the last reference goes there
        assert len(list(client.results(10))) == 1
        assert not loops


def test_streams_sessions_and_batches(redis_db: str, serving_thread: None) -> None:
    """Each is the asyncio client's own, waited for."""
    with BlockingRolloutClient(redis_db) as client:
        deltas = list(client.stream(token_ids=[1, 2], n=2, sampling=SHORT, timeout=10))
        assert sorted(delta.sample for delta in deltas if delta.result is not None) == [0, 1]
        groups = client.generate([[1], [2, 3]], SHORT, 2, timeout=10)
        assert [len(group.results) for group in groups] == [2, 2]
        with client.session(token_ids=[1], sampling=SHORT) as session:
            result = session.generate([2], timeout=10)
            assert session.token_ids.tolist() == [1, 2, *result.token_ids]
            branch = session.branch(at=1)
            assert [delta.result is not None for delta in branch.stream([9], timeout=10)][-1]
            assert branch.token_ids.tolist()[:2] == [1, 9]
            session.replace(1, [5])
            session.give([6])
            assert session.mask.tolist() == [0, 0, 0]
            assert len(session.logprobs) == len(session.versions) == len(session) == 3
            assert session.worker == result.worker_id
            assert branch.session_id.startswith(session.session_id)
        with pytest.raises(RolloutMQError, match="closed"):
            session.generate()


def test_a_handle_waits_for_its_results(redis_db: str, serving_thread: None) -> None:
    with BlockingRolloutClient(redis_db) as client:
        handle = client.submit(token_ids=[4, 5], n=2, sampling=SHORT, metadata={"k": 1})
        results = handle.result(timeout=10)
        assert [one.sample for one in results] == [0, 1]
        assert (results[0].prompt_ids.tolist(), results[0].metadata) == ([4, 5], {"k": 1})
        late = client.submit(tokens(min_version=9))
        with pytest.raises(WaitTimeout):
            late.result(timeout=0.05)
        assert client.cancel([late]) == ["ok"]
        assert "client" not in repr(late)
