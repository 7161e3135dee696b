"""Requests with a key: the same answer for each repeat, and nothing generated twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.pools.pool import eventually
from support.specimens.messages import result

from rolloutmq import GenerateJob, InvalidField
from rolloutmq.messages import JobFailure, MessageError, PoolBusy, codec, connect, encode
from rolloutmq.messages.errors import TurnRefused
from rolloutmq.messages.model import EmbedJob, EmbedResult
from rolloutmq.messages.redis import PoolRedis
from rolloutmq.ops.gateway.answers import results_of
from rolloutmq.ops.gateway.requests import KeyReused, Request, RequestLost, Requests

OWNER = "acme/gw-1"
EMPTY = b"\x01\x01\x30\x80"
"""A message of the kind that answers are, with nothing in it."""


@pytest.fixture
async def redis(redis_db: str) -> AsyncIterator[PoolRedis]:
    async with connect(redis_db, pool="default") as opened:
        yield opened


@pytest.fixture
async def requests(redis: PoolRedis) -> Requests:
    made = Requests(redis, "default")
    await redis.hset(made.keys.gateways, OWNER, "")
    return made


async def begin(requests: Requests, key: str = "k", digest: bytes = b"body", **more: Any) -> Request:
    return await requests.begin("acme", key, digest, OWNER, **more)


def answer(request: Request, n: int = 1) -> list[list[Any]]:
    jobs = [GenerateJob(id=job_id, token_ids=[5, 6], n=n) for job_id in request.job_ids]
    return [[result(job, sample) for sample in range(n)] for job in jobs]


async def test_a_repeat_gets_the_answer(requests: Requests) -> None:
    first = await begin(requests)
    again = await begin(requests)
    assert (first.state, again.state, again.id, again.job_ids) == ("new", "running", first.id, first.job_ids)
    waiting = asyncio.create_task(requests.wait(again, 30))
    given = answer(first, n=2)
    assert await requests.finish(first, given) is given
    assert await waiting == given
    third = await begin(requests)
    assert (third.state, third.answer) == ("done", given)


@pytest.mark.parametrize(("reason", "kept"), [("taken", True), ("turns", True), ("pool", False), ("memory", False)])
async def test_a_turn_that_is_refused_is_told_to_whoever_asks_later(redis: PoolRedis, reason: str, kept: bool) -> None:
    async def refuse(*_: Any) -> None:
        raise TurnRefused("the session takes no turn", reason)

    requests = Requests(redis, "default", record=refuse)
    await redis.hset(requests.keys.gateways, OWNER, "")
    first = await begin(requests)
    with pytest.raises(TurnRefused):
        await requests.finish(first, answer(first))
    assert requests.unfinished(first) is not kept
    found = await requests.look("acme", first.id)
    assert found is not None
    if kept:
        assert found.answer is not None
        with pytest.raises(TurnRefused, match="takes no turn") as refused:
            results_of(found.answer)
        assert refused.value.reason == reason
    else:
        assert found.state == "running"


async def test_only_what_is_known_comes_back(requests: Requests) -> None:
    """Prompts of ids are told once for each job; those that results carry are left there."""
    first = await begin(requests, prompts=[np.array([1, 2, 3], np.int32), None])
    ids, texts = answer(first, n=2)
    texts = [it.model_copy(update={"prompt_ids": np.array([9], np.int32), "text": "hé"}) for it in texts]
    assert await requests.finish(first, [ids, texts]) == [ids, texts]
    found = (await begin(requests)).answer
    assert isinstance(found, list)
    assert [[it.prompt_ids.tolist() for it in job] for job in found] == [[[1, 2, 3]] * 2, [[9]] * 2]  # type: ignore[union-attr]
    assert [it.text for it in found[1]] == ["hé"] * 2  # type: ignore[union-attr]
    known = await requests.look("acme", first.id)
    assert known is not None
    assert (known.state, known.seed, known.owner) == ("done", first.seed, OWNER)


async def test_a_request_that_runs_is_known_with_its_jobs(requests: Requests) -> None:
    first = await begin(requests, prompts=[np.array([1, 2, 3], np.int32), None])
    known = await requests.look("acme", first.id)
    assert known is not None
    assert (known.state, known.job_ids, known.answer) == ("running", first.job_ids, None)
    assert [None if it is None else it.tolist() for it in known.prompts] == [[1, 2, 3], None]
    assert await requests.wait(known, 0.01) is None
    for tenant, name in (("other", first.id), ("acme", "0" * 32), ("acme", "no id"), ("acme", "")):
        assert await requests.look(tenant, name) is None


async def test_results_of_tasks_and_failures_are_answers(requests: Requests) -> None:
    embedded = await begin(requests)
    vectors = EmbedResult(
        **{"job_id": embedded.job_ids[0], "sample": 0, "n": 1, "group_id": embedded.id, "worker_id": "w", "attempt": 1},
        version=3,
        tokens=2,
        embedding=np.array([0.5, 1.0], np.float32),
    )
    await requests.finish(embedded, [[vectors]])
    assert (await begin(requests)).answer == [[vectors]]
    failed = await begin(requests, "k2")
    failure = JobFailure(job_id=failed.job_ids[0], group_id=failed.id, outcome="expired", cause="too late", attempts=2)
    await requests.finish(failed, failure)
    found = (await begin(requests, "k2")).answer
    assert isinstance(found, JobFailure)
    assert str(found) == str(failure)


async def test_another_body_is_refused(requests: Requests) -> None:
    first = await begin(requests)
    with pytest.raises(KeyReused, match="another body"):
        await begin(requests, digest=b"other")
    await requests.finish(first, answer(first))
    with pytest.raises(KeyReused):
        await begin(requests, digest=b"other")
    assert (await requests.begin("other", "k", b"other", OWNER)).state == "new"  # each tenant has keys of its own


async def test_one_of_many_at_once_is_new(redis_db: str, requests: Requests) -> None:
    async with connect(redis_db, pool="default") as second:
        both = [requests, Requests(second, "default")]
        found = await asyncio.gather(*(begin(both[number % 2]) for number in range(32)))
    assert sorted(it.state for it in found) == ["new"] + ["running"] * 31
    assert len({it.seed for it in found}) == 1


async def test_a_key_that_is_taken_is_left_alone_where_only_a_new_one_will_do(requests: Requests) -> None:
    first = await begin(requests, only_new=True)
    assert first.id == (await begin(requests)).id
    others = [await begin(requests, only_new=True, digest=digest) for digest in (b"body", b"other")]
    assert {it.state for it in others} == {"new"}
    assert len({it.id for it in (first, *others)}) == 3


async def test_the_first_answer_counts(requests: Requests) -> None:
    first = await begin(requests)
    given, other = answer(first), JobFailure(job_id=first.job_ids[0], outcome="cancelled", cause="late")
    assert await requests.finish(first, given) == given
    assert await requests.finish(first, given) == given
    assert await requests.finish(first, other) == given
    assert (await begin(requests)).answer == given


async def test_an_answer_is_forgotten_after_a_while(redis: PoolRedis) -> None:
    requests = Requests(redis, "default", remember_s=0.2)
    await redis.hset(requests.keys.gateways, OWNER, "")
    first = await begin(requests)
    await requests.finish(first, answer(first))

    async def new() -> Request | None:
        found = await begin(requests)
        return found if found.state == "new" else None

    second = await eventually(new)
    assert second.id == first.id
    assert not {*second.job_ids} & {*first.job_ids}
    with pytest.raises(RequestLost, match="Send it again"):  # of the first one, who comes late
        await requests.finish(first, answer(first))
    with pytest.raises(RequestLost):
        await requests.wait(first, 30)
    assert await counted(redis, requests) == (0, 0)


async def counted(redis: PoolRedis, requests: Requests) -> tuple[int, int]:
    """Answers that are kept, and what the pool says that they hold."""
    return await redis.zcard(requests.keys.answered), int(await redis.hget(requests.keys.load, "answered") or 0)


async def test_a_dropped_request_is_new_again(redis: PoolRedis, requests: Requests) -> None:
    first = await begin(requests)
    await requests.drop(first)
    second = await begin(requests)
    await requests.drop(first)  # which says nothing about the second one
    assert (second.state, (await begin(requests)).seed) == ("new", second.seed)
    await requests.finish(second, answer(second))
    held = await counted(redis, requests)
    assert held[0] == 1
    assert held[1] > 0
    await requests.drop(second)
    assert await counted(redis, requests) == (0, 0)
    assert (await begin(requests)).state == "new"


async def test_what_was_inherited_is_dropped_by_nobody_else(redis: PoolRedis, requests: Requests) -> None:
    first, heir = await begin(requests), Requests(redis, "default")
    await redis.hset(requests.keys.gateways, OWNER, "gw-2")
    await requests.drop(first)
    await heir.drop(first)
    assert (await begin(requests)).state == "running"


async def test_an_owner_that_has_not_finished_drops_no_answer(redis: PoolRedis, requests: Requests) -> None:
    first, heir = await begin(requests), Requests(redis, "default")
    given = await heir.finish(first, answer(first))
    for _ in range(2):
        await requests.drop(first)
    assert (await begin(requests)).answer == given
    await redis.hdel(requests.keys.gateways, OWNER)
    await heir.drop(first)  # whoever was asked to forget it
    await redis.hset(requests.keys.gateways, OWNER, "")
    assert (await begin(requests)).state == "new"


async def test_all_answers_together_are_bounded(redis: PoolRedis) -> None:
    requests = Requests(redis, "default", most_bytes=100)
    await redis.hset(requests.keys.gateways, OWNER, "")
    first = await begin(requests)
    await requests.finish(first, answer(first))
    with pytest.raises(PoolBusy, match="at most 100") as busy:
        await begin(requests, "k2")
    assert busy.value.reason == "answers"
    assert (await begin(requests)).state == "done"
    await requests.drop(first)
    assert (await begin(requests, "k2")).state == "new"


async def test_a_wrong_count_of_answers_mends_itself(redis: PoolRedis, requests: Requests) -> None:
    for wrong in ("junk", 1 << 40, -5):
        await redis.hset(requests.keys.load, "answered", wrong)
        await requests.drop(await begin(requests))
    assert await counted(redis, requests) == (0, -5)


async def test_an_answer_that_is_too_large_is_for_its_caller_alone(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await begin(requests)
    given = answer(first, n=8)
    with monkeypatch.context() as smaller:
        smaller.setattr(codec, "MAX_MESSAGE_BYTES", 500)
        assert await requests.finish(first, given) == given
    assert "its answer is not kept" in caplog.text
    found = (await begin(requests)).answer
    assert isinstance(found, JobFailure)
    assert "too large to be kept" in found.cause
    assert "at most 500 bytes" in found.error


async def test_a_request_without_jobs_is_refused(requests: Requests) -> None:
    with pytest.raises(InvalidField, match="1 to 131072 jobs"):
        await begin(requests, prompts=[])


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe", b"9" * 400, encode(EmbedJob(id="0" * 32, token_ids=[[1]])), EMPTY])
async def test_garbage_in_a_record_is_told_or_begun_anew(redis: PoolRedis, requests: Requests, junk: bytes) -> None:
    first = await begin(requests)
    key = requests.keys.request(f"acme/{first.id}")
    await redis.hset(key, "prompts", junk)
    assert await requests.look("acme", first.id) is None
    await redis.hset(key, "answer", junk)
    for asks in (begin(requests), requests.look("acme", first.id), requests.wait(first, 30)):
        with pytest.raises(MessageError):
            await asks
    await redis.hdel(key, "answer")
    await redis.hset(key, "seed", junk)
    assert await requests.look("acme", first.id) is None
    with pytest.raises(RequestLost):
        await requests.wait(first, 30)
    again = await begin(requests)
    assert (again.state, again.id) == ("new", first.id)
    assert await redis.ttl(key) > 0


async def test_a_record_of_a_wrong_type_is_set_aside(redis: PoolRedis, requests: Requests) -> None:
    first = await begin(requests)
    key = requests.keys.request(f"acme/{first.id}")
    await redis.delete(key)
    await redis.set(key, "junk")
    assert await requests.look("acme", first.id) is None
    with pytest.raises(RequestLost):
        await requests.wait(first, 30)
    assert (await begin(requests)).state == "new"
    await redis.delete(requests.keys.answered)
    await redis.set(requests.keys.answered, "junk")
    second = await begin(requests, "k2")
    await requests.finish(second, answer(second))
    assert (await counted(redis, requests))[0] == 1
