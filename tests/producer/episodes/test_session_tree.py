"""Recorded sessions as a trainer takes them: the tree of turns against a naive model, rows, waits, and both clients."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.specimens.turns import turn

from rolloutmq import (
    BlockingRolloutClient,
    InvalidField,
    RolloutClient,
    RolloutResult,
    SamplingParams,
    Segment,
    WaitTimeout,
)
from rolloutmq.messages import Broker
from rolloutmq.messages.broker import RecordedSessions
from rolloutmq.messages.errors import NoSuchSession, TurnRefused
from rolloutmq.producer import RecordedSession
from rolloutmq.producer.training import Row, to_trl

Ids = list[int]


def session(*turns: RolloutResult) -> RecordedSession:
    return RecordedSession("default", "s", turns)


def ids(turn: RolloutResult) -> tuple[Ids, Ids]:
    assert turn.prompt_ids is not None
    return turn.prompt_ids.tolist(), turn.token_ids.tolist()


# --- the tree ---------------------------------------------------------------------------------------------------------


def naive_parents(turns: Sequence[tuple[Ids, Ids]]) -> list[int | None]:
    """Each turn is compared with each other one."""
    found: list[int | None] = []
    for number, (prompt, _) in enumerate(turns):
        fitting = [
            (len(p + o), other < number, other if other < number else -other, other)
            for other, (p, o) in enumerate(turns)
            if len(p) < len(prompt) and prompt[: len(p + o)] == p + o
        ]
        found.append(max(fitting)[-1] if fitting else None)
    return found


def naive_rows(turns: Sequence[tuple[Ids, Ids]], parents: Sequence[int | None]) -> list[tuple[Ids, list[int | None]]]:
    """(ids, which turn each token trains) of each leaf."""
    rows, trained = [], set[int]()
    for leaf, (prompt, output) in enumerate(turns):
        if leaf in parents:
            continue
        ids, trains = prompt + output, list[int | None]([None] * len(prompt + output))
        at: int | None = leaf
        while at is not None:
            if at not in trained:
                trained.add(at)
                start = len(turns[at][0])
                trains[start : start + len(turns[at][1])] = [at] * len(turns[at][1])
            at = parents[at]
        rows.append((ids, trains))
    return [row for row in rows if any(one is not None for one in row[1])]


few = st.lists(st.integers(0, 1), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[Ids, Ids]]:
    """Turns that go on from an earlier turn, whole or in part, in any order of arrival."""
    turns = [(draw(few), draw(few))]
    for _ in range(draw(st.integers(0, 12))):
        prompt, output = draw(st.sampled_from(turns))
        before = (prompt + output)[: draw(st.integers(0, 12))]
        turns.append((before + draw(few), draw(few)))
    return draw(st.permutations(turns))


@given(conversations())
def test_the_tree_is_that_of_a_naive_model(turns: list[tuple[Ids, Ids]]) -> None:
    taken = session(*(turn(prompt, output, number) for number, (prompt, output) in enumerate(turns)))
    assert list(taken.parents) == naive_parents(turns)
    expected = naive_rows(turns, taken.parents)
    rows = taken.rows(0.5, 3)
    assert [row.ids.tolist() for row in rows] == [row for row, _ in expected]
    for row, (ids, trains) in zip(rows, expected, strict=True):
        assert row.mask.tolist() == [int(one is not None) for one in trains]
        assert row.turns.tolist() == [-1 if one is None else one for one in trains]
        assert row.versions.tolist() == row.turns.tolist()  # the version is the turn's number here
        assert row.logprobs.tolist() == [
            0.0 if one is None else -one_id for one, one_id in zip(trains, ids, strict=True)
        ]
        assert (row.prompt, row.reward, row.group) == (row.mask.tolist().index(1), 0.5, 3)
    sampled = sum(len(output) for _, output in turns)
    assert sum(int(row.mask.sum()) for row in rows) == sampled  # each turn is trained, and once


def one_row(taken: RecordedSession) -> Row:
    (row,) = taken.rows()
    return row


def test_a_conversation_is_one_row() -> None:
    row = one_row(session(turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6], 6, finish_reason="length")))
    assert row.ids.tolist() == [1, 2, 3, 4, 9, 6]
    assert row.mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert row.versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert row.turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert (row.prompt, row.stop, math.isnan(row.reward)) == (2, "length", True)


def test_a_stop_that_the_template_drops_or_replaces_is_a_fork() -> None:
    taken = session(turn([1], [2, 99]), turn([1, 2, 7], [3]), turn([1, 2, 98, 7], [4]))
    assert taken.parents == (None, None, None)
    assert [row.ids.tolist() for row in taken.rows()] == [[1, 2, 99], [1, 2, 7, 3], [1, 2, 98, 7, 4]]


def test_samples_of_one_prompt_and_a_repeated_turn_are_siblings() -> None:
    taken = session(turn([1], [2]), turn([1], [2]), turn([1], [3]), turn([1, 2, 5], [6]))
    assert taken.parents == (None, None, None, 1)  # of equal ones the newest
    assert [row.ids.tolist() for row in taken.rows()] == [[1, 2], [1, 3], [1, 2, 5, 6]]


def test_a_turn_that_two_paths_share_is_trained_once() -> None:
    first, second = session(turn([1], [2]), turn([1, 2, 5], [6]), turn([1, 2, 7], [8])).rows()
    assert (first.ids.tolist(), first.mask.tolist(), first.prompt) == ([1, 2, 5, 6], [0, 1, 0, 1], 1)
    assert (second.ids.tolist(), second.mask.tolist(), second.prompt) == ([1, 2, 7, 8], [0, 0, 0, 1], 3)
    assert to_trl([second])["prompt_ids"] == [[1, 2, 7]]


def test_empty_and_aborted_turns() -> None:
    taken = session(turn([1], []), turn([1], [2], finish_reason="abort"), turn([1, 5], []))
    assert taken.parents == (None, None, 0)
    row = one_row(taken)
    assert (row.ids.tolist(), row.stop) == ([1, 2], "abort")
    assert session().rows() == []


def test_a_turn_goes_on_though_it_was_recorded_first() -> None:
    taken = session(turn([1, 2, 5], [6]), turn([1], [2]))
    assert taken.parents == (1, None)
    assert one_row(taken).turns.tolist() == [-1, 1, -1, 0]


def test_a_turn_that_cannot_be_trained_is_named() -> None:
    with pytest.raises(InvalidField, match=r"turns\[1\].logprobs"):
        session(turn([1], [2]), turn([3], [4], logprobs=None)).rows()
    with pytest.raises(InvalidField, match=r"turns\[0\].prompt_ids"):
        session(turn([1], [2], prompt_ids=None)).rows()


def test_a_long_session_is_compared_by_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 turns that share 10,000 tokens: each is compared with the one that it goes on from, and no other."""
    compared: list[int] = []
    equal = np.array_equal

    def counted(one: np.ndarray, other: np.ndarray) -> bool:
        compared.append(len(one))
        return bool(equal(one, other))

    monkeypatch.setattr(np, "array_equal", counted)
    said, turns = np.arange(10_000, dtype=np.int32), list[RolloutResult]()
    for number in range(1000):
        turns.append(turn(said, [number], number))
        said = np.append(said, [number, 7]).astype(np.int32)
    taken = session(*turns)
    assert taken.parents == (None, *range(999))
    assert len(compared) == 999
    assert one_row(taken).mask.sum() == 1000


# --- the clients ------------------------------------------------------------------------------------------------------


async def test_a_trainer_takes_what_was_recorded(client: RolloutClient) -> None:
    store = RecordedSessions(client.broker)
    for tenant in ("default", "other"):
        await store.record(tenant, "s", "k0", turn([1, 2], [3], segments=(Segment(4, 1),)))
        await store.record(tenant, "s", "k1", turn([1, 2, 3, 5], [6], 5))
    (listed,) = [one async for one in client.sessions()]
    assert (listed.name, listed.turns, listed.taken) == ("s", 2, False)
    taken = await client.take_session("s")
    assert ids(taken.turns[1]) == ([1, 2, 3, 5], [6])
    (row,) = taken.rows(1.0)
    assert (row.ids.tolist(), row.versions.tolist()) == ([1, 2, 3, 5, 6], [-1, -1, 4, -1, 5])
    with pytest.raises(TurnRefused, match="taken"):
        await store.record("default", "s", "k2", turn([1], [2]))
    await store.record("other", "s", "k2", turn([1], [2]))
    assert await client.forget_session("s")
    assert [one async for one in client.sessions()] == []
    with pytest.raises(NoSuchSession, match="forgotten"):
        await client.take_session("s", timeout=None)  # nothing to wait for
    assert len((await client.take_session("s", "other")).turns) == 3


@pytest.mark.usefixtures("serving")
async def test_what_a_pool_generated_comes_back_token_by_token(client: RolloutClient) -> None:
    """Results of token ids have their prompts from the client that asked, and not on the wire."""
    store, prompt = RecordedSessions(client.broker), [1, 2, 3]
    turns = list[RolloutResult]()
    for number in range(3):
        (result,) = await client.wait(await client.submit(token_ids=prompt, sampling=SamplingParams(max_new_tokens=4)))
        await store.record("default", "s", f"{number}:0", result)
        turns.append(result)
        prompt = [*prompt, *result.token_ids.tolist(), 7]
    taken = await client.take_session("s")
    assert [ids(one) for one in taken.turns] == [ids(one) for one in turns]
    (row,) = taken.rows()
    assert row.ids.tolist() == prompt[:-1]
    assert row.mask.tolist() == [0] * 3 + ([1] * 4 + [0]) * 2 + [1] * 4
    sampled = np.concatenate([one.logprobs for one in turns if one.logprobs is not None])
    assert row.logprobs[row.mask == 1].tolist() == sampled.tolist()
    assert (await client.sessions().__anext__()).nbytes < 10_000


async def test_a_session_without_a_turn(client: RolloutClient) -> None:
    with pytest.raises(NoSuchSession, match="session 'late' of tenant 'default': no turn has come to it yet"):
        await client.take_session("late")
    with pytest.raises(WaitTimeout, match=r"waited 0.05 s for its first turn: session 'late'"):
        await client.take_session("late", timeout=0.05)
    waiting = asyncio.create_task(client.take_session("late", timeout=None))
    await RecordedSessions(client.broker).record("default", "late", "k", turn([1], [2]))
    assert len((await waiting).turns) == 1


async def test_the_blocking_client_takes_sessions_too(redis_db: str, broker: Broker) -> None:
    await RecordedSessions(broker).record("default", "s", "k", turn([1], [2]))

    def take() -> None:
        with BlockingRolloutClient(redis_db) as client:
            assert [one.name for one in client.sessions()] == ["s"]
            assert client.take_session("s", timeout=5).rows(1.0)[0].ids.tolist() == [1, 2]
            assert client.forget_session("s")
            with pytest.raises(InvalidField, match="tenant"):
                list(client.sessions("a/b"))

    await asyncio.to_thread(take)
