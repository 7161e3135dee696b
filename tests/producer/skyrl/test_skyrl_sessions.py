"""Sessions: append, branch, replace, drop, fork; and what a lost worker costs."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from support.pools.pool import worker
from support.pools.skyrl import check_output, engine

from rolloutmq.messages import InvalidField
from rolloutmq.producer.skyrl import InferenceEngineOutput, SkyRLEngine
from rolloutmq.producer.skyrl.sessions import SessionRequest, SessionTree
from rolloutmq.worker.scripted.engine import ScriptedEngine

TOKENS = 4


class Spy(ScriptedEngine):
    """Remembers the prompts it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[int]] = []

    async def generate(self, request: Any) -> Any:
        self.prompts.append(request.token_ids.tolist())
        return await super().generate(request)


async def turn(
    it: SkyRLEngine, session: str, ids: list[int], spy: Spy, n: int = 1, **how: Any
) -> tuple[InferenceEngineOutput, list[int]]:
    """The output of one turn, and the whole prompt that the engine got for it."""
    batch: Any = {"prompt_token_ids": [ids], "sampling_params": {"max_tokens": TOKENS, "n": n}}
    output = await it.generate_with_session(session, batch, **how)
    prompt = spy.prompts[-1]
    check_output(output, [len(prompt)] * n)
    return output, prompt


def rid(output: InferenceEngineOutput, place: int = 0) -> str:
    assert output["request_ids"] is not None
    return output["request_ids"][place]


async def test_append_branch_replace_and_drop(redis_db: str) -> None:
    spy = Spy()
    async with worker(redis_db, engine=spy), engine(redis_db) as it:
        session = await it.open_session()
        assert session is not None
        first, prompt = await turn(it, session, [1, 2], spy)
        assert prompt == [1, 2]
        one = [1, 2, *first["response_ids"][0]]

        second, prompt = await turn(it, session, [3], spy, rid=rid(first))
        assert prompt == [*one, 3]  # -1: behind all of it
        two = [*prompt, *second["response_ids"][0]]

        _, prompt = await turn(it, session, [4], spy, rid=rid(first), offset=-1)
        assert prompt == [*one, 4]
        _, prompt = await turn(it, session, [4], spy, rid=rid(second), offset=3)
        assert prompt == [*two[:3], 4]
        _, prompt = await turn(it, session, [4], spy, rid=rid(second), offset=0)
        assert prompt == [4]
        _, prompt = await turn(it, session, [4], spy, rid=rid(second), offset=len(two))
        assert prompt == [*two, 4]
        _, prompt = await turn(it, session, [4], spy, rid=rid(second), drop_previous_output=True)
        assert prompt == [*one, 3, 4]
        branch, prompt = await turn(it, session, [4], spy, rid=rid(second), drop_previous_output=True, offset=2)
        assert prompt == [1, 2, 4]

        replaced, prompt = await turn(it, session, [5], spy, rid=rid(first), replace=True)
        assert prompt == [*one, 5]
        for forgotten in (second, branch):
            with pytest.raises(InvalidField, match="rid="):
                await turn(it, session, [6], spy, rid=rid(forgotten))

        with pytest.raises(InvalidField, match="prompts"):  # a batch that is wrong replaces nothing
            await it.generate_with_session(session, {}, replace=True)
        _, prompt = await turn(it, session, [6], spy, rid=rid(replaced), drop_previous_output=True)
        assert prompt == [*one, 5, 6]

        again, prompt = await turn(it, session, [7], spy, replace=True)
        assert prompt == [7]
        _, prompt = await turn(it, session, [8], spy, rid=rid(again))
        assert prompt == [7, *again["response_ids"][0], 8]
        for forgotten in (first, replaced):
            with pytest.raises(InvalidField, match="rid="):
                await turn(it, session, [6], spy, rid=rid(forgotten))


def test_a_long_conversation_costs_each_token_once_and_can_be_replaced() -> None:
    turns, own = 1500, np.arange(7, dtype=np.int32)
    tree = SessionTree()
    parent, said = None, []
    for number in range(turns):
        prefix = tree.prefix(parent)
        prompt = prefix.tokens.then(own)
        said += [*own, number]
        parent = str(number)
        tree.add(SessionRequest(parent, prompt, prompt.then(np.array([number], np.int32)), prefix.parent))
    newest = tree.newest()
    assert newest is not None
    assert newest.whole.all().tolist() == said
    assert all(newest.whole.upto(end).all().tolist() == said[:end] for end in (0, 1, 7, 8, 9, len(said) - 1, len(said)))
    parts = {id(part): part for one in tree.requests.values() for part in (one.prompt, one.whole)}
    assert sum(len(part.own) for part in parts.values()) == len(said)
    assert tree.fork().prefix(parent).tokens.all().tolist() == said
    assert tree.prefix("0", replace=True).tokens.end == 8
    assert [*tree.requests] == ["0"]
    assert newest.whole.all().tolist() == said  # of a request that was under way when its parent was replaced


async def test_every_sample_is_a_branch(redis_db: str) -> None:
    spy = Spy()
    async with worker(redis_db, engine=spy), engine(redis_db) as it:
        session = await it.open_session(session_id="mine")
        assert session == "mine"
        output, _ = await turn(it, session, [1], spy, n=3)
        for place in range(3):
            _, prompt = await turn(it, session, [2], spy, rid=rid(output, place))
            assert prompt == [1, *output["response_ids"][place], 2]


async def test_forks(redis_db: str) -> None:
    spy = Spy()
    async with worker(redis_db, engine=spy), engine(redis_db) as it:
        await it.open_session(session_id="a")
        first, _ = await turn(it, "a", [1, 2], spy)
        whole = [1, 2, *first["response_ids"][0]]
        assert await it.fork_session("a", "b") == "b"
        of_b, prompt = await turn(it, "b", [9], spy, rid=rid(first), replace=True)
        assert prompt == [*whole, 9]
        _, prompt = await turn(it, "a", [8], spy, rid=rid(first))
        assert prompt == [*whole, 8]
        with pytest.raises(InvalidField, match="rid="):  # what b does is b's alone
            await turn(it, "a", [8], spy, rid=rid(of_b))

        cut = await it.fork_session("b", offset=3)
        assert cut is not None
        _, prompt = await turn(it, cut, [7], spy)
        assert prompt == [*whole[:3], 7]
        assert await it.fork_session("a", "b") is None
        with pytest.raises(InvalidField, match="offset=99"):
            await it.fork_session("a", offset=99)
        assert await it.open_session(session_id=cut) is None


async def test_opening_and_closing(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        assert await it.open_session(session_id="a") == "a"
        assert await it.open_session(session_id="a") is None
        await it.close_session("a")
        batch: Any = {"prompt_token_ids": [[1]]}
        for refused in (it.close_session("a"), it.fork_session("a"), it.generate_with_session("a", batch)):
            with pytest.raises(InvalidField, match="session_id='a'"):
                await refused
        assert await it.open_session(session_id="a") == "a"


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"rid": "nobody"}, "rid"),
        ({"offset": 3}, "rid"),
        ({"drop_previous_output": True}, "rid"),
        ({"rid": "first", "offset": 7}, "offset"),
        ({"rid": "first", "offset": -2}, "offset"),
        ({"rid": "first", "offset": 6, "drop_previous_output": True}, "offset"),
    ],
)
async def test_what_cannot_be_continued(redis_db: str, how: dict[str, Any], field: str) -> None:
    spy = Spy()
    async with worker(redis_db, engine=spy), engine(redis_db) as it:
        await it.open_session(session_id="a")
        first, _ = await turn(it, "a", [1, 2], spy)
        if how.get("rid") == "first":
            how = how | {"rid": rid(first)}
        with pytest.raises(InvalidField) as caught:
            await turn(it, "a", [3], spy, **how)
        assert caught.value.field == field


async def test_a_session_stays_with_its_worker_and_survives_it(redis_db: str) -> None:
    async with AsyncExitStack() as stack:
        engines = [Spy() for _ in range(3)]
        pool = [await stack.enter_async_context(worker(redis_db, engine=spy)) for spy in engines]
        it = await stack.enter_async_context(engine(redis_db))
        await it.open_session(session_id="a")
        batch: Any = {"prompt_token_ids": [[1, 2]], "sampling_params": {"max_tokens": TOKENS}}
        output = await it.generate_with_session("a", batch)
        expected = [1, 2, *output["response_ids"][0]]
        (home,) = [place for place, spy in enumerate(engines) if spy.prompts]
        for _ in range(5):
            output = await it.generate_with_session("a", batch, rid=rid(output))
            expected += [1, 2, *output["response_ids"][0]]
        assert len(engines[home].prompts) == 6

        await pool[home].die()
        output = await it.generate_with_session("a", batch, rid=rid(output))
        (prompt,) = [spy.prompts[-1] for place, spy in enumerate(engines) if place != home and spy.prompts]
        assert prompt == [*expected, 1, 2]
        check_output(output, [len(prompt)])
