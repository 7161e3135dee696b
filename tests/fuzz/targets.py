"""What is fuzzed: every decoder of what others may have written into Redis, each with good inputs to break.

A case is plain data: what Redis would answer. `make` makes a broken one, `run` gives it to the decoders. They may raise
RolloutMQError where their documentation says so, and nothing else; beside a broken entry the good ones come through.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from support.specimens.messages import ID, job, result, specimens

from fuzz.lines import make_asked, make_told, run_asked, run_told
from fuzz.mutator import mutated, mutated_bytes, pack, unpack
from fuzz.recorded import make_turns, run_turns
from fuzz.stub import Answers
from rolloutmq.messages import Broker, Lease, MessageError, RolloutMQError, decode, encode
from rolloutmq.messages.broker import CommandBox
from rolloutmq.messages.broker.command_channel import CommandSender, Sent
from rolloutmq.messages.broker.dead_letters import DeadLetters, successor
from rolloutmq.messages.codec import KINDS
from rolloutmq.messages.model import Command, GenerateJob, WeightAnnouncement
from rolloutmq.messages.redis import Bell, Keys
from rolloutmq.producer.calls.stream import Watched
from rolloutmq.producer.inbox import Inbox
from rolloutmq.sync.transfer import Ledger, TransferReport, VersionHolder, heard
from rolloutmq.worker.jobs import HeldJob, admit_all
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer

Case = Any
FRAMES = {name: encode(message) for name, message in specimens().items()}
JOB = job(id=ID, n=2)
NUMBERS = (
    b"",
    b"abc",
    b"\xff\xfe",
    b"-1",
    b"1.5",
    b"inf",
    b"nan",
    b"9" * 5000,
    b"99999999999999999999",
    b"1e400",
    b"0x1",
)
TEXTS = (b"", b"\xff\xfe", b"\0", b"x" * 10_000, b"[" * 5000, b"{" * 300, b'{"ranks":Infinity}', b'"\\ud800"', b"null")
NAMES = (
    b"",
    b"\xff\xfe",
    b"k0.x",
    b"k",
    b"kk",
    b"s99999999999999999999",
    b"s0x",
    b"k1.999999999999999999999",
    b"report:\xff",
)


@dataclass(frozen=True)
class Target:
    """make: a broken case. run: gives it to the decoders."""

    make: Callable[[Random], Case]
    run: Callable[[Case], Awaitable[None]]


def _frame(rng: Random, *names: str) -> bytes:
    """A broken frame of one of these specimens, or of any."""
    good = FRAMES[rng.choice(names or tuple(FRAMES))]
    if rng.random() < 0.2:
        return mutated_bytes(good, rng)
    return good[:3] + pack(mutated(unpack(good[3:]), rng))


def _hash(rng: Random, good: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """A hash, or the fields of an entry, with one to three fields missing, wrong or too many."""
    fields = dict(good)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*fields, b"?"])
        what = rng.randrange(5)
        if what == 0:
            fields.pop(name, None)
        elif what == 1:
            fields[name] = rng.choice(NUMBERS + TEXTS)
        elif what == 2:
            fields[rng.choice(NAMES)] = fields.get(name, b"1")
        elif what == 3:
            fields[mutated_bytes(name, rng)[:200]] = b"1"
        else:
            fields[name] = mutated_bytes(fields.get(name, b"1"), rng)
    return fields


def _pieces(rng: Random) -> list[bytes]:
    names = ("partial", "wide-partial", "adapter-partial", "text-partial")
    return [rng.choice((FRAMES["partial"], _frame(rng, *names))) for _ in range(rng.randint(1, 3))]


# --- frames -----------------------------------------------------------------------------------------------------------


async def _run_frame(case: Case) -> None:
    for kind in {KINDS.get(case[2], GenerateJob), GenerateJob} if len(case) > 2 else {GenerateJob}:
        with contextlib.suppress(MessageError):
            found = decode(case, kind)
            assert encode(decode(encode(found), kind)) == encode(found)


# --- replies ----------------------------------------------------------------------------------------------------------


def _make_reply(rng: Random) -> Case:
    good = {b"j": ID.encode(), b"s": b"0", b"m": FRAMES["result"], b"l": b"1"}
    failed = {
        b"j": ID.encode(),
        b"o": b"dead",
        b"c": b"cause",
        b"h": b"",
        b"e": b"",
        b"a": b"1",
        b"d": b"0",
        b"G": b"g",
    }
    if rng.random() < 0.6:
        names = [name for name in FRAMES if name.endswith("result")]
        return good | {b"m": _frame(rng, *names)}
    return _hash(rng, rng.choice((good, failed)))


async def _run_reply(case: Case) -> None:
    good = result(JOB, 0)
    fields = {b"j": JOB.id.encode(), b"s": b"0", b"m": encode(good), b"l": b"0"}
    stream = Keys("p").reply("client").encode()
    broker = Broker(Answers({"xread": [[stream, [(b"1-0", case), (b"2-0", fields), (b"3-0", case)]]]}), "p")  # type: ignore[arg-type]
    replies = await broker.read_replies("client", "0")
    assert [reply.entry_id for reply in replies] == ["1-0", "2-0", "3-0"]
    assert replies[1].outcome == good
    inbox = Inbox()
    for reply in replies:
        inbox.put(reply)


# --- claims: a job's record as a worker gets it -----------------------------------------------------------------------


def _make_claim(rng: Random) -> Case:
    names = [name for name in FRAMES if name.endswith("job") or name == "chat"]
    known = (b"k0", b"k1", b"k0.1", b"s0", b"s1", b"x", b"k0.x", b"s0x", b"k1.\xff", b"s7", b"k9", b"k0." + b"9" * 30)
    progress = [rng.choice((*known, b"c", b"M", b"P"))]
    progress += [rng.choice((b"", *_pieces(rng)))]
    if rng.random() < 0.5:
        progress += [b"k0", _pieces(rng)[0], b"k0.1", _pieces(rng)[0]]
    return [rng.choice((encode(JOB), FRAMES["job"], _frame(rng, *names))), progress]


async def _run_claim(case: Case) -> None:
    fine = job(n=1)
    rows = [
        *(0, -1),  # when to claim again, and its share
        *(JOB.id.encode(), b"1", b"2", b"0", b"", case[0], case[1]),
        *(fine.id.encode(), b"1", b"1", b"0", b"5000", encode(fine), []),
    ]
    lease = Lease(Answers({"execute_command": rows}), "p", "w")  # type: ignore[arg-type]
    claims = await lease.claim(2, 2, 0)
    assert [claim.job_id for claim in claims] == [JOB.id, fine.id]
    admitted = {claim.job_id: found async for claim, found in admit_all(claims, ScriptedEngine().info, NoTokenizer())}
    assert admitted.keys() == {JOB.id, fine.id}
    assert isinstance(admitted[fine.id], HeldJob)


# --- pieces of a streamed sample --------------------------------------------------------------------------------------


async def _run_pieces(case: Case) -> None:
    watched = Watched(ID, 0)
    for pieces in (case, case[:1], [*case, FRAMES["partial"]]):
        watched.take(pieces)
    watched.finish(result(JOB, 0))


# --- other records ----------------------------------------------------------------------------------------------------


def _make_record(rng: Random) -> Case:
    numbers = dict.fromkeys((b"jobs", b"bytes", b"unread", b"accepted", b"done", b"owed1"), b"5")
    letter = {b"id": ID.encode(), b"cause": b"c", b"host": b"h", b"error": b"e", b"attempts": b"3", b"at": b"5"}
    return {
        b"load": _hash(rng, numbers),
        b"letter": _hash(rng, letter | {b"payload": _frame(rng, "job")}),
        b"ids": [ID.encode(), rng.choice(NAMES + TEXTS)],
        b"status": _frame(rng, "status", "engine-status"),
        b"answer": _frame(rng, "command-reply"),
        b"command": _frame(rng, "command"),
        b"number": rng.choice(NUMBERS),
        b"job": _frame(rng, "job", "tool-job"),
        b"state": rng.choice(TEXTS),
    }


async def _run_record(case: Case) -> None:
    letter = [item for pair in case[b"letter"].items() for item in pair]
    command = Command(id=ID, action="a", timeout_s=1.0)
    fields = {"status": case[b"status"], "p": case[b"job"], "G": case[b"state"], "w": case[b"answer"]}
    answers: dict[str, Any] = {
        "smembers": set(case[b"ids"]),
        "hget": lambda _, field: fields.get(field, case[b"number"]),
        "hmget": lambda _, names: [fields.get(field, case[b"number"]) for field in names],
        "hexists": 1,
        "hgetall": case[b"load"],
        "hlen": 9,
        "llen": 1,
        "zcard": 1,
        "zrange": case[b"ids"],
        "zrangebyscore": case[b"ids"],
        "time": (1, 2),
        "xread": [[b"news", [(b"1-0", case[b"letter"]), (b"2-0", {b"j": case[b"ids"][1]})]]],
        "xrange": [(b"1-0", case[b"letter"])],
        "execute_command": lambda name, *_: [b"1-0", 5, b"head", letter] if name == "EVALSHA" else None,
    }
    redis: Any = Answers(answers)
    broker = Broker(redis, "p")
    await broker.submitted(await broker.open_jobs("client"))
    await broker.unread()
    await broker.load()
    await broker.workers()
    await broker.read_news("client", "0", block_ms=1, redis=redis)
    lease = Lease(redis, "p", "w")
    await lease.attempts([ID])
    await lease.held()
    letters = DeadLetters(broker)
    assert len(await letters.page(count=1)) == 1
    with contextlib.suppress(RolloutMQError):
        successor(await letters.get("1-0"))
    sender = CommandSender(redis, "p")
    await sender.answers(Sent(command, ("w",), 0.0))
    await sender.gone(["w"])
    answers["execute_command"] = [case[b"command"], 5]
    with contextlib.suppress(MessageError):
        await CommandBox(redis, "p", "w").take(ID)
    answers["execute_command"] = [case[b"state"]]
    await broker.cancel([ID])
    await broker.enqueue([JOB])


# --- ledger -----------------------------------------------------------------------------------------------------------


def _json(tree: Any) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(one) for name, one in value.items()}
        return [*map(plain, value)] if isinstance(value, list | tuple) else value

    return json.dumps(plain(tree), default=repr).encode(errors="replace")


HOLDER = VersionHolder(3, "h:1", "t").to_json().encode()


def _make_ledger(rng: Random) -> Case:
    report = TransferReport(ok=True, phase="done").to_json().encode()
    epoch = {b"st": b"closed", b"m": FRAMES["announcement"], b"report:w": report, b"lost": b'{"v": "is lost"}'}
    if rng.random() < 0.3:
        epoch |= {b"m": _frame(rng, "announcement", "adapter-announcement")}
    if rng.random() < 0.5:
        name = rng.choice((b"lost", b"report:w"))
        epoch[name] = _json(mutated(json.loads(epoch[name]), rng))
    weights = {b"committed": b"3", b"highest": b"4", b"digest": b"d", b"open": b"1", b"epochs": b"1"}
    weights |= {b"adapter:a": b"2", b"number:a": b"1", b"highest:a": b"2"}
    return {
        b"epoch": _hash(rng, epoch) if rng.random() < 0.5 else epoch,
        b"weights": _hash(rng, weights),
        b"holders": _hash(rng, {b"": HOLDER, b"w": rng.choice((HOLDER, _json(mutated(json.loads(HOLDER), rng))))}),
        b"clock": _hash(rng, {b"at": b"5"}),
        b"version": _hash(rng, {b"st": b"committed", b"at": b"1", b"closed": b"2"}),
    }


async def _run_ledger(case: Case) -> None:
    def hgetall(key: str) -> Any:
        return next((fields for name, fields in case.items() if f":{name.decode()}" in key), {})

    def hmget(key: str, *names: str) -> list[bytes | None]:
        return [hgetall(key).get(name.encode()) for name in names]

    ledger = Ledger(
        Answers(  # type: ignore[arg-type]
            {
                "hgetall": hgetall,
                "hmget": hmget,
                "hget": lambda key, name: hmget(key, name)[0],
                "hrandfield": lambda key, *_: [item for pair in hgetall(key).items() for item in pair],
                "zrangebyscore": [b"w", b"\xff"],
                "time": (1, 2),
            }
        ),
        "p",
    )
    for number in (ledger.committed, ledger.open_epoch):
        assert isinstance(await number(), int)
    await ledger.adapters()
    assert all(isinstance(number, int) for number in (await ledger.newest()).values())
    await ledger.heading()
    trainer, workers = await ledger.holders(3)
    for holder in (*workers, *([trainer] if trainer else [])):
        assert (holder.version, type(holder.address), type(holder.token)) == (3, str, str)
        assert 0 < len(holder.address) <= 300
    await ledger.adapter_holder("a")
    await ledger.version_state(3)
    with contextlib.suppress(MessageError):
        await ledger.announced(1)
    with contextlib.suppress(MessageError):
        epoch = await ledger.epoch(1)
        assert epoch is None or epoch.state in {"open", "closed"}
        for who, why in epoch.lost.items() if epoch is not None else ():
            assert (type(who), type(why)) == (str, str)


# --- bell -------------------------------------------------------------------------------------------------------------


def _make_bell(rng: Random) -> Case:
    told = b64encode(rng.choice((FRAMES["announcement"], _frame(rng, "announcement"))))
    good = {b"kind": rng.choice((b"cancel", b"command", b"weights")), b"ids": ID.encode(), b"id": b"5", b"told": told}
    return _hash(rng, good)


async def _run_bell(case: Case) -> None:
    answers = [[[b"bell", [(b"1-0", case), (b"2-0", {b"kind": b"stop", b"ids": b"a"})]]]]

    def xread(_: Any) -> Any:
        if not answers:
            raise asyncio.CancelledError
        return answers.pop()

    rings: list[dict[str, str]] = []
    bell = Bell(Answers({"xread": xread, "xrevrange": []}), "p")  # type: ignore[arg-type]
    with contextlib.suppress(asyncio.CancelledError):
        await bell.listen(rings.append)
    assert rings[-1] == {"kind": "stop", "ids": "a"}
    assert len(rings) == 2
    assert all(told is None or isinstance(told, WeightAnnouncement) for told in map(heard, rings))


TARGETS = {
    "frames": Target(_frame, _run_frame),
    "replies": Target(_make_reply, _run_reply),
    "claims": Target(_make_claim, _run_claim),
    "pieces": Target(_pieces, _run_pieces),
    "records": Target(_make_record, _run_record),
    "ledger": Target(_make_ledger, _run_ledger),
    "bell": Target(_make_bell, _run_bell),
    "asked": Target(make_asked, run_asked),
    "told": Target(make_told, run_told),
    "turns": Target(make_turns, run_turns),
}
