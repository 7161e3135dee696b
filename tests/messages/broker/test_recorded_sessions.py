"""Recorded sessions: turns come in once, in order and within bounds; a taken session takes no more; nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually
from support.specimens.messages import job
from support.specimens.turns import turn

from rolloutmq.messages import Broker, InvalidField, PoolBusy, RolloutResult, encode
from rolloutmq.messages.broker import Caps, RecordedSessions, SessionSummary, broker_of, recorded_sessions
from rolloutmq.messages.errors import MalformedMessage, MessageError, NoSuchSession, TurnRefused
from rolloutmq.messages.redis import SESSION
from rolloutmq.messages.scripts import Scripts
from rolloutmq.messages.scripts.calls import Call


@pytest.fixture
def store(broker: Broker) -> RecordedSessions:
    return RecordedSessions(broker)


async def every(store: RecordedSessions, tenant: str = "default") -> list[SessionSummary]:
    return sorted([one async for one in store.listed(tenant)], key=lambda one: one.name)


def ids(turns: list[RolloutResult]) -> list[tuple[list[int], list[int]]]:
    return [([] if one.prompt_ids is None else one.prompt_ids.tolist(), one.token_ids.tolist()) for one in turns]


async def test_turns_come_back_whole_and_in_order(store: RecordedSessions) -> None:
    first = turn([1, 2], [3, 4], 7, text="hé", metadata={"a": 1})
    others = [turn([1, 2, 3, 4, 5], [6]), turn([9], []), turn([1, 2], [3, 4]), turn([1, 2, 3, 9], [9])]
    for number, one in enumerate((first, *others)):
        await store.record("default", "agent-1", f"request:{number}", one)
    taken = await store.take("default", "agent-1")
    assert ids(taken) == ids([first, *others])
    assert (taken[0].text, taken[0].metadata, taken[0].versions) == ("hé", {"a": 1}, (7,))
    assert [one.job_id for one in taken] == [one.job_id for one in (first, *others)]
    assert taken[0].logprobs is not None
    assert taken[0].logprobs.tolist() == [-3.0, -4.0]
    assert ids(await store.take("default", "agent-1")) == ids(taken)


async def test_a_turn_is_recorded_once(store: RecordedSessions, broker: Broker) -> None:
    for output in (3, 4):
        await store.record("default", "s", "k", turn([1], [output]))
    held = (await broker.load()).session_bytes
    await store.record("default", "s", "k2", turn([1], [4]))
    assert ids(await store.take("default", "s")) == [([1], [3]), ([1], [4])]
    await store.record("default", "s", "k", turn([1], [3]))  # a repeat of what is in changes nothing, also now
    assert len(await store.take("default", "s")) == 2
    (listed,) = await every(store)
    assert 0 < held < listed.nbytes == (await broker.load()).session_bytes


async def test_a_taken_session_takes_no_further_turns(store: RecordedSessions) -> None:
    await store.record("default", "s", "k", turn([1], [2]))
    await store.take("default", "s")
    with pytest.raises(TurnRefused, match="session 's' of tenant 'default': it was taken") as refused:
        await store.record("default", "s", "k2", turn([1], [3]))
    assert refused.value.reason == "taken"
    assert ids(await store.take("default", "s")) == [([1], [2])]


async def test_what_is_not_there_says_so(store: RecordedSessions) -> None:
    with pytest.raises(NoSuchSession, match="session 's' of tenant 'default': no turn has come to it yet"):
        await store.take("default", "s")
    assert not await store.forget("default", "s")
    await store.record("default", "s", "k", turn([1], [2]))  # asking has not closed it


async def test_a_forgotten_session_is_remembered(store: RecordedSessions, broker: Broker, db: Redis) -> None:
    await store.record("default", "s", "k", turn([1], [2]))
    assert [await store.forget("default", "s"), await store.forget("default", "s")] == [True, True]
    with pytest.raises(NoSuchSession, match="it was forgotten"):
        await store.take("default", "s")
    with pytest.raises(TurnRefused, match="taken or forgotten"):
        await store.record("default", "s", "k2", turn([1], [3]))
    assert await every(store) == []
    assert (await broker.load()).session_bytes == 0
    assert 0 < await db.ttl(broker.keys.session("default/s")) <= 3600


async def test_sessions_are_listed_by_tenant(store: RecordedSessions) -> None:
    names = [f"s{number:04}" for number in range(700)]  # more than a page
    await asyncio.gather(*(store.record("a", name, "k", turn([1], [2, 3])) for name in names))
    await store.record("a.b", "other", "k", turn([1], [2]))
    await store.record("a", "s0001", "k2", turn([1], [2, 4]))
    await store.take("a", "s0001")
    listed = await every(store, "a")
    assert [one.name for one in listed] == names
    assert (listed[0].turns, listed[0].tokens, listed[0].taken) == (1, 3, False)
    assert (listed[1].turns, listed[1].tokens, listed[1].taken) == (2, 6, True)
    assert 1e9 < listed[1].first_at <= listed[1].last_at
    assert [one.name for one in await every(store, "a.b")] == ["other"]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda store: store.record("a/b", "s", "k", turn([1], [2])), "tenant"),
        (lambda store: store.record("*", "s", "k", turn([1], [2])), "tenant"),
        (lambda store: store.record("a", "", "k", turn([1], [2])), "session"),
        (lambda store: store.take("a", "s" * 129), "session"),
        (lambda store: store.forget("a", "s\n"), "session"),
        (lambda store: store.record("a", "s", "k k", turn([1], [2])), "turn_key"),
        (lambda store: store.record("a", "s", "k", turn([1], [2], prompt_ids=None)), "prompt_ids"),
        (lambda store: store.record("a", "s", "k", turn([1], [2], logprobs=None)), "logprobs"),
        (lambda store: every(store, "a*"), "tenant"),
    ],
)
async def test_what_cannot_be_a_turn_is_refused_by_name(store: RecordedSessions, call: Any, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        await call(store)
    assert refused.value.field == field
    assert await every(store, "a") == []


@pytest.mark.parametrize(
    ("bound", "most", "reason"),
    [("MAX_TURNS", 2, "turns"), ("MAX_SESSION_TOKENS", 9, "tokens"), ("MAX_SESSION_BYTES", 2000, "bytes")],
)
async def test_a_session_is_bounded(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, bound: str, most: int, reason: str
) -> None:
    monkeypatch.setattr(recorded_sessions, bound, most)
    store = RecordedSessions(broker)
    for number in range(2):
        await store.record("default", "s", f"k{number}", turn([1, 2, 3], [4]))
    with pytest.raises(TurnRefused) as refused:
        await store.record("default", "s", "k2", turn([1, 2, 3], [4]))
    assert refused.value.reason == reason
    await store.record("default", "s", "k1", turn([1, 2, 3], [4]))
    await store.record("default", "another", "k2", turn([1, 2, 3], [4]))
    assert len(await store.take("default", "s")) == 2


async def test_all_sessions_together_are_bounded(db: Redis) -> None:
    broker = broker_of(db, "default", Caps(nbytes=40_000 * max(1, len(getattr(db, "shards", ())))))
    store = RecordedSessions(broker)
    await store.record("default", "s0", "k", turn([1], [2]))
    for number in range(1, 10_000 // (await broker.load()).session_bytes):
        await store.record("default", f"s{number}", "k", turn([1], [2]))
    with pytest.raises(TurnRefused, match="all sessions together") as refused:
        await store.record("default", "more", "k", turn([1], [2]))
    assert refused.value.reason == "pool"
    await store.forget("default", "s0")
    await store.record("default", "more", "k", turn([1], [2]))


@pytest.mark.one_shard
async def test_sessions_count_in_the_pools_bytes(db: Redis) -> None:
    broker = broker_of(db, "default", Caps(nbytes=4000))
    store = RecordedSessions(broker)
    await broker.enqueue([job()])
    await store.record("default", "s", "k", turn([1], [2]))
    large = job(token_ids=[1] * 850)  # 3.4 KB, which fit without the turn
    with pytest.raises(PoolBusy, match="sessions hold") as busy:
        await broker.enqueue([large])
    assert busy.value.reason == "bytes"
    await store.forget("default", "s")
    assert await broker.enqueue([large]) == ["new"]


async def test_a_conversation_takes_memory_in_proportion_to_its_length(store: RecordedSessions) -> None:
    said: list[int] = list(range(1000))
    turns = []
    for number in range(40):
        turns.append(turn(said, [number] * 20))
        await store.record("default", "s", f"k{number}", turns[-1])
        said = [*said, *[number] * 20, 7, 7]
    (listed,) = await every(store)
    assert listed.tokens == sum(len(one.prompt_ids) + 20 for one in turns if one.prompt_ids is not None)
    assert listed.nbytes < 4 * len(said) + 40 * 1500 < listed.tokens * 4 / 1.4
    assert ids(await store.take("default", "s")) == ids(turns)


@pytest.mark.parametrize("who", ["client", "worker"])
async def test_a_session_that_nobody_uses_ends_and_is_counted(broker: Broker, joined: Any, who: str) -> None:
    lease = await joined()
    long, short = RecordedSessions(broker), RecordedSessions(broker, idle_s=0.001)
    for name in ("taken", "lost", "old"):
        await short.record("default", name, "k", turn([1], [2]))
    await short.take("default", "taken")
    await long.record("default", "old", "k2", turn([1], [3]))

    async def old_alone() -> list[SessionSummary]:
        await (broker.end_overdue() if who == "client" else lease.reap(3))
        listed = await every(long)
        return listed if [one.name for one in listed] == ["old"] else []

    (old,) = await eventually(old_alone)
    load = await broker.load()
    assert (load.sessions_expired, load.session_bytes) == (1, old.nbytes)
    with pytest.raises(NoSuchSession):
        await long.take("default", "lost")


async def test_a_turn_that_races_with_a_take_is_taken_or_refused(broker: Broker) -> None:
    for round_ in range(20):
        stores, name = [RecordedSessions(broker) for _ in range(3)], f"s{round_}"
        await stores[0].record("default", name, "first", turn([0], [1]))

        async def write(store: RecordedSessions, writer: int, name: str = name) -> set[int]:
            inside = set[int]()
            for number in range(50):
                try:
                    await store.record("default", name, f"{writer}:{number}", turn([0, 1, writer], [writer, number]))
                except TurnRefused:
                    break
                inside.add(100 * writer + number)
            return inside

        writers = [asyncio.create_task(write(store, 1 + place)) for place, store in enumerate(stores[:2])]
        for _ in range(round_):
            await stores[2].forget("default", "nobody")  # each time a little later
        taken = [one.token_ids.tolist() for one in (await stores[2].take("default", name))[1:]]
        assert {100 * writer + number for writer, number in taken} == set().union(*[await writer for writer in writers])


async def test_a_session_that_begins_anew_in_between(
    store: RecordedSessions, monkeypatch: pytest.MonkeyPatch, db: Redis, broker: Broker
) -> None:
    await store.record("default", "s", "k", turn([1, 2], [3]))
    once = Scripts.run

    async def run(scripts: Scripts, call: Call) -> Any:
        if call.script == "record_turn" and call.args[5]:
            await db.delete(broker.keys.session("default/s"))
        return await once(scripts, call)

    monkeypatch.setattr(Scripts, "run", run)
    await store.record("default", "s", "k2", turn([1, 2, 3], [4]))
    assert ids(await store.take("default", "s")) == [([1, 2, 3], [4])]


def _without_prompt() -> bytes:
    return encode(turn([1], [2], prompt_ids=None))


@pytest.mark.parametrize(
    "spoilt",
    [
        {f"{SESSION.frame}1": b"x"},
        {f"{SESSION.frame}1": _without_prompt()},
        {f"{SESSION.begins}1": b"1 1"},
        {f"{SESSION.begins}1": b"0 99"},
        {f"{SESSION.begins}1": b"-1 0"},
        {f"{SESSION.turns}": b"3"},
        {f"{SESSION.turns}": b"999999999999"},
    ],
)
async def test_a_hostile_record_is_an_error_by_name(
    store: RecordedSessions, broker: Broker, db: Redis, spoilt: dict[str, bytes]
) -> None:
    for number in range(2):
        await store.record("default", "s", f"k{number}", turn([1, 2], [3]))
    await db.hset(broker.keys.session("default/s"), mapping=spoilt)
    with pytest.raises(MessageError):
        await store.take("default", "s")


async def test_frames_cannot_grow_without_bound(
    store: RecordedSessions, broker: Broker, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn repeats the whole one before it, twice as long: a few bytes that would become gigabytes."""
    monkeypatch.setattr(recorded_sessions, "MAX_SESSION_TOKENS", 1 << 16)
    rest = encode(turn(np.arange(4), [1]))
    key = broker.keys.session("default/s")
    frames: dict[str, bytes] = {f"{SESSION.frame}{number}": rest for number in range(200)}
    frames |= {f"{SESSION.begins}{number}": b"%d %d" % (number - 1, 5 * number) for number in range(1, 200)}
    await db.hset(key, mapping={SESSION.turns: 200, **frames})
    with pytest.raises(MalformedMessage, match="too many"):
        await store.take("default", "s")
