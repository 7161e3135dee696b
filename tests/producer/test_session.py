"""Sessions and batches on a pool: what is in a history, where its turns go, and what survives."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from support.pools.pool import check_scripted, eventually, worker
from support.specimens.byte_tokenizer import END, START, Bytes

from rolloutmq import InvalidField, JobFailed, RolloutClient, RolloutMQError, SamplingParams, WaitTimeout
from rolloutmq.messages import Broker
from rolloutmq.worker.scripted.engine import ScriptedEngine

SHORT = SamplingParams(max_new_tokens=4)


async def test_a_history_has_what_was_given_and_what_was_generated(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db) as running, client.session(token_ids=[1, 2], sampling=SHORT, session_id="s") as session:
        first = await session.generate([3], timeout=10)
        assert first.session_id == "s"
        second = await session.generate(np.array([4, 5]), sampling=SamplingParams(max_new_tokens=2), timeout=10)
        third = await session.generate(timeout=10)
    expected = [1, 2, 3, *first.token_ids, 4, 5, *second.token_ids, *third.token_ids]
    assert session.token_ids.tolist() == expected
    assert session.mask.tolist() == [0] * 3 + [1] * 4 + [0] * 2 + [1] * 2 + [1] * 4
    assert session.versions.tolist() == [-1] * 3 + [0] * 4 + [-1] * 2 + [0] * 6
    generated = session.mask == 1
    assert np.isnan(session.logprobs[~generated]).all()
    logprobs = [first.logprobs, second.logprobs, third.logprobs]
    assert np.allclose(session.logprobs[generated], np.concatenate(logprobs))  # type: ignore[arg-type]
    assert session.worker == running.id
    check_scripted(third, len(expected) - 4)
    assert client.outstanding == 0


async def test_turns_go_to_the_worker_that_has_the_prefix(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db), worker(redis_db):
        sessions = [client.session(token_ids=[i], sampling=SHORT, prefer_s=30.0) for i in range(6)]
        seen: list[set[str]] = []

        async def talk(place: int) -> None:
            for _ in range(5):
                seen[place].add((await sessions[place].generate([7], timeout=20)).worker_id)

        seen += [set() for _ in sessions]
        await asyncio.gather(*(talk(i) for i in range(6)))
    assert all(len(workers) == 1 for workers in seen)


async def test_a_lost_worker_costs_the_prefix_not_the_session(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db) as first:
        session = client.session(token_ids=[1], sampling=SHORT)
        await session.generate(timeout=10)
        await first.die()
        async with worker(redis_db) as second:
            result = await session.generate([2], timeout=10)
            assert result.worker_id == session.worker == second.id
    assert len(session) == 1 + 4 + 1 + 4


async def test_branches_go_their_own_ways(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db):
        session = client.session(token_ids=[1, 2, 3], sampling=SHORT)
        await session.generate(timeout=10)
        whole, early = session.branch(), session.branch(at=2)
        before = session.token_ids.tolist()
        await asyncio.gather(whole.generate([8], timeout=10), early.generate([9], timeout=10))
        assert session.token_ids.tolist() == before
        assert whole.token_ids.tolist()[:8] == [*before, 8]
        assert early.token_ids.tolist()[:3] == [1, 2, 9]
        assert len({session.session_id, whole.session_id, early.session_id}) == 3
        session.replace(3, [5, 6])
        assert session.token_ids.tolist() == [1, 2, 3, 5, 6]
        assert session.mask.tolist() == [0] * 5
        session.give([7])
        result = await session.generate(timeout=10)
        check_scripted(result, 6)


async def test_a_chat_is_rendered_turn_by_turn(redis_db: str, client: RolloutClient) -> None:
    """The model's own tokens stay what they are, which no encoding of their text would give."""
    tokenizer = Bytes()
    async with worker(redis_db, tokenizer=tokenizer), client.session(system="be", sampling=SHORT) as session:
        first = await session.generate("hi", timeout=10)
        opening = tokenizer.encode_chat([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
        assert first.prompt_ids.tolist() == opening.tolist()
        assert max(first.token_ids) > 257, "ids that have no text"
        await session.generate([{"role": "tool", "content": "42"}], timeout=10)
    turn = [END, 10, START, *b"tool\n42", END, 10, START, *b"assistant\n"]
    assert session.token_ids.tolist()[:-4] == [*opening, *first.token_ids, *turn]
    assert session.mask.sum() == 8


async def test_text_goes_on_behind_text(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db, tokenizer=Bytes(), engine=ScriptedEngine(echo=True)):
        session = client.session(sampling=SHORT)
        result = await session.generate("abcdef", timeout=10)
        assert result.text == "abcd"
        await session.generate("gh", timeout=10)
    assert bytes(session.token_ids.tolist()) == b"abcdefabcdghabcd"


async def test_a_turn_can_be_streamed(redis_db: str, client: RolloutClient) -> None:
    engine = ScriptedEngine(echo=True, tokens_per_s=200.0)
    text = "größer 漢字 🎉 " * 4
    async with worker(redis_db, tokenizer=Bytes(), engine=engine):
        session = client.session(sampling=SamplingParams(max_new_tokens=len(text.encode())))
        deltas = [delta async for delta in session.stream(text, timeout=10)]
        assert "".join(delta.text or "" for delta in deltas) == text
        assert len(deltas) > 1
        assert all("\ufffd" not in (delta.text or "") for delta in deltas)
        assert len(session) == 2 * len(text.encode())
        async with aclosing(session.stream([1], timeout=10)) as deltas_of_one:
            await anext(deltas_of_one)
        assert len(session) == 2 * len(text.encode()), "left early: as it was"
        await eventually(lambda: session._turn is None)
        assert client.outstanding == 0, "its outcome is nobody's"


async def test_a_turn_that_fails_leaves_the_history_as_it_was(redis_db: str, client: RolloutClient) -> None:
    session = client.session(token_ids=[1, 2], sampling=SHORT)
    with pytest.raises(WaitTimeout):
        await session.generate([3], timeout=0.05)
    assert session.token_ids.tolist() == [1, 2]
    assert client.outstanding == 0, "it is cancelled, and its outcome is nobody else's"
    async with worker(redis_db):
        with pytest.raises(JobFailed, match="text: this worker has no tokenizer"):
            await session.generate("text", timeout=10)
        assert session.token_ids.tolist() == [1, 2]
        await session.generate([3], timeout=10)
        assert len(session) == 7


async def test_one_turn_at_a_time_and_none_after_the_end(redis_db: str, client: RolloutClient) -> None:
    session = client.session(token_ids=[1], sampling=SHORT)
    turn = asyncio.create_task(session.generate(timeout=20))
    await eventually(lambda: client.outstanding)
    for act in (lambda: session.give([1]), lambda: session.replace(0)):
        with pytest.raises(RolloutMQError, match="a turn under way"):
            act()
    with pytest.raises(RolloutMQError, match="a turn under way"):
        await session.generate()
    await session.close()
    with pytest.raises(JobFailed, match="cancelled"):
        await turn
    with pytest.raises(RolloutMQError, match="closed"):
        await session.generate()
    with pytest.raises(RolloutMQError, match="closed"):
        session.branch()
    assert session.token_ids.tolist() == [1]


async def test_a_turn_that_is_on_its_way_to_the_pool_is_cancelled_when_it_is_there(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, may_go = client._core.broker, asyncio.Event()
    enqueue, cancel, cancelled = broker.enqueue, broker.cancel, list[str]()

    async def held_up(*args: Any, **more: Any) -> Any:
        await may_go.wait()
        return await enqueue(*args, **more)

    async def noted(ids: Any, *args: Any) -> Any:
        states = await cancel(ids, *args)
        cancelled.extend(states)
        return states

    monkeypatch.setattr(broker, "enqueue", held_up)
    monkeypatch.setattr(broker, "cancel", noted)
    session = client.session(token_ids=[1], sampling=SHORT)
    turn = asyncio.create_task(session.generate(timeout=20))
    await eventually(lambda: client.outstanding)
    closing = asyncio.create_task(session.close())
    await eventually(lambda: cancelled)
    may_go.set()
    with pytest.raises(JobFailed, match="cancelled"):
        await turn
    await closing


async def test_a_turn_whose_caller_leaves_while_it_is_submitted_leaves_no_job(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, enqueue = asyncio.Event(), Broker.enqueue

    async def never_answered(*args: Any, **more: Any) -> Any:
        await enqueue(*args, **more)
        there.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Broker, "enqueue", never_answered)
    turn = asyncio.create_task(client.session(token_ids=[1], sampling=SHORT).generate())
    await there.wait()
    turn.cancel()
    await asyncio.wait({turn})
    assert turn.cancelled()
    assert (client.outstanding, (await client.load()).open_jobs) == (0, 0)


async def test_bad_input_is_named(client: RolloutClient) -> None:
    session = client.session(token_ids=[1, 2])
    for act, says in (
        (lambda: session.replace(3), "start=3: 0 to 2"),
        (lambda: session.branch(at=-1), "at=-1: 0 to 2"),
        (lambda: client.session(system="s", token_ids=[1]), "system="),
    ):
        with pytest.raises(InvalidField, match=says):
            act()
    with pytest.raises(InvalidField, match="n=2"):
        await session.generate(n=2)
    with pytest.raises(InvalidField, match="session is empty"):
        await client.session().generate()
    with pytest.raises(InvalidField, match="behind the system message"):
        await client.session(system="s").generate([1])
    with pytest.raises(InvalidField, match=r"prompt=1\.5"):
        await session.generate(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[2.9], [-5], [1 << 31], [1 << 70], [True, False], [[1]], np.array([2.9]), ["1"], "ab"])
async def test_what_is_no_token_id_is_refused_when_it_is_given(client: RolloutClient, ids: Any) -> None:
    session = client.session(token_ids=[1, 2])
    for field, act in (
        ("token_ids", lambda: session.give(ids)),
        ("token_ids", lambda: session.replace(1, ids)),
        ("token_ids", lambda: client.session(token_ids=ids)),
    ):
        with pytest.raises(InvalidField) as caught:
            act()
        assert caught.value.field == field
    if not isinstance(ids, str):
        with pytest.raises(InvalidField, match="prompt="):
            await session.generate(ids)
    assert session.token_ids.tolist() == [1, 2]


# --- many prompts at once --------------------------------------------------------------------------------------------


async def test_groups_come_in_the_order_of_their_prompts(redis_db: str, client: RolloutClient) -> None:
    prompts = [[1, 2], "text", [{"role": "user", "content": "hi"}], np.array([3])]
    async with worker(redis_db, tokenizer=Bytes()):
        groups = await client.generate(prompts, SHORT, 3, timeout=10)
    assert [len(group.results) for group in groups] == [3] * 4
    assert all(group.ok for group in groups)
    assert [result.sample for group in groups for result in group.results] == [0, 1, 2] * 4
    for prompt_len, group in zip((2, 4, 21, 1), groups, strict=True):
        for result in group.results:
            check_scripted(result, prompt_len)
    assert [group.results[0].text is None for group in groups] == [True, False, False, True]
    assert client.outstanding == 0


async def test_more_prompts_than_may_be_outstanding(redis_db: str) -> None:
    async with worker(redis_db), RolloutClient(redis_db, max_outstanding=10) as client:
        groups = await client.generate([[i] for i in range(50)], SHORT, n=4, timeout=10)
        assert [len(group.results) for group in groups] == [4] * 50
        assert await client.generate([]) == []


async def test_what_fails_is_in_its_group(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db):
        good, bad = await client.generate([[1], "no tokenizer here"], SHORT, timeout=10)
    assert good.ok
    assert bad.results == ()
    assert "no tokenizer" in str(bad.failures[0])


async def test_what_is_no_prompt_is_named_before_anything_is_submitted(client: RolloutClient) -> None:
    for bad in (1, [], b"bytes", [1, "a"], [[1]], None, [True]):
        with pytest.raises(InvalidField, match=r"prompts\[1\]"):
            await client.generate([[1], bad])
    assert (await client.load()).accepted == 0


async def test_a_batch_that_is_given_up_is_cancelled(client: RolloutClient) -> None:
    with pytest.raises(WaitTimeout):
        await client.generate([[1], [2]], timeout=0.05)
    assert (await client.load()).cancelled == 2
    assert [outcome async for outcome in client.results(10)] == [], "they were nobody else's"
    assert client.outstanding == 0
