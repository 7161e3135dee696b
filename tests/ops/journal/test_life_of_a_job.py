"""`rolloutmq job`: one screen whatever the job is, from a journal or the pool, and never a traceback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from support.pools.pool import status
from support.specimens.messages import SHORT, result
from typer.testing import CliRunner

from rolloutmq import GenerateJob, SamplingParams
from rolloutmq.messages import Broker, Partial, RolloutResult, Segment, connect
from rolloutmq.messages.broker import Finished, Lease, Piece, can_of
from rolloutmq.messages.journal import Entry, Journal
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.journal import coloured

T = TypeVar("T")
ID = "a" * 32
VERSION_PAST = bytes([99, 0, 2, 0])
"""A frame of a later major version."""


def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, list(map(str, arguments)), env=environment)
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return ended.exit_code, ended.stdout, ended.stderr


def sample(number: int, **more: Any) -> RolloutResult:
    return result(GenerateJob(id=ID, token_ids=[5, 6], n=256, reply_to="me"), number, **{"n": 256} | more)


def test_a_job_of_many_samples_is_one_screen(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.job(GenerateJob(id=ID, token_ids=[5, 6], n=256, reply_to="me"))
        for number in range(256):
            journal.outcome(sample(number), "me")
            journal.note((ID, number, 1), reward=float(number))
        for number in range(100):
            journal.note(ID, number=number)
    code, shown, _ = run("job", ID, "--journal", tmp_path)
    assert code == 0
    assert len(shown.splitlines()) < 60
    for told in ("256 of 256 samples", "sample 7:", "248 more samples are left out", "92 more notes are left out"):
        assert told in shown
    assert "sample 8:" not in shown
    code, shown, _ = run("job", ID, "--journal", tmp_path, "--sample", 200, "--sample", 300)
    assert ("sample 200:" in shown, "sample 0:" in shown) == (True, False)
    assert "no result of sample 300" in shown
    assert len(json.loads(run("job", ID, "--journal", tmp_path, "--json")[1])["results"]) == 256


def test_events_of_every_kind_are_shown_in_time_and_bounded(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for number in range(200):
            journal.add(Entry("lost", 100.0 + number, ID, data={"what": "claimed", "number": number}))
        journal.add(Entry("result", 50.0, ID, "me", sample=0, attempt=1, content=sample(0)))
    code, shown, _ = run("job", ID, "--journal", tmp_path)
    lines = shown.splitlines()
    assert code == 0
    assert (len(lines) < 40, "176 more events are left out" in shown) == (True, True)
    assert next(line for line in lines if "claimed" in line).endswith("lost: claimed; number=0")
    assert [line for line in lines if "claimed" in line][-1].endswith("number=199")
    assert next(at for at, line in enumerate(lines) if "sample 0:" in line) < next(
        at for at, line in enumerate(lines) if "claimed" in line
    )


def test_what_workers_did_is_told_once(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        claimed = {"what": "claimed", "worker": "w1", "queued_s": 0.25, "samples": 1, "continued": []}
        journal.add(Entry("attempt", 1.0, ID, attempt=1, data=claimed))
        for number in range(30):
            saved = {"what": "saved", "worker": "w1", "start": number * 8, "tokens": 8, "state": "ok"}
            journal.add(Entry("attempt", 2.0 + number, ID, sample=0, attempt=1, versions=(7,), data=saved))
        journal.add(Entry("attempt", 50.0, ID, attempt=2, data=claimed | {"worker": "w2", "continued": [0]}))
        done = {"what": "published", "worker": "w2", "state": "ok"}
        for number in (0, 1):
            journal.add(Entry("attempt", 60.0, ID, sample=number, attempt=2, data=done))
        journal.add(Entry("result", 61.0, ID, "me", sample=0, attempt=2, content=sample(0)))
        journal.add(Entry("consumed", 62.0, ID, "me", sample=0, attempt=2))
    _, shown, _ = run("job", ID, "--journal", tmp_path)
    times = [line for line in shown.splitlines() if line.startswith("  1970")]
    assert [line.split("  ", 2)[2] for line in times] == [
        "claimed by w1, attempt 1; queued_s=0.25, samples=1, continued=[]",
        "sample 0: saved by w1, attempt 1, version 7; start=232, tokens=8, state=ok",
        "claimed by w2, attempt 2; queued_s=0.25, samples=1, continued=[0]",
        "sample 1: published by w2, attempt 2; state=ok",
        "sample 0: 2 tokens, length",
    ]
    assert "consumed by me" in shown


def test_data_of_another_type_is_shown_as_well(tmp_path: Path) -> None:
    odd = np.zeros(3, np.float32)
    with Journal(tmp_path) as journal:
        for event in ("attempt", "worker", "weights", "lost", "consumed", "note"):
            journal.add(Entry(event, 1.0, ID, data={"what": odd, "worker": odd, "rest": odd, "n": None}))
        journal.add(Entry("failure", 2.0, ID, data={"outcome": odd, "cause": odd, "error": odd, "host": 7}))
    code, shown, _ = run("job", ID, "--journal", tmp_path)
    assert (code, "rest=float32[3]" in shown) == (0, True)
    assert run("journal", tmp_path)[0] == 0
    assert run("job", ID, "--journal", tmp_path, "--json")[0] == 0
    assert run("journal", "export", tmp_path, tmp_path / "e.parquet", "--table", "events")[0] == 0


def test_what_is_redacted_damaged_or_newer_is_said(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.add(Entry("job", 1.0, ID, "me"))
        journal.add(Entry("result", 2.0, ID, "me", sample=0, attempt=1, content=b"\x01\x00\x02nothing"))
        journal.add(Entry("result", 3.0, ID, "me", sample=1, attempt=1, content=VERSION_PAST))
        journal.add(Entry("failure", 4.0, ID))
        journal.add(Entry("note", 5.0, ID, sample=1))
    code, shown, _ = run("job", ID, "--journal", tmp_path, "--tokens")
    assert code == 0
    for told in ("written without its content", "cannot be read", "version 99", "failed;", "does not have its tokens"):
        assert told in shown
    code, shown, _ = run("journal", tmp_path)
    assert (code, len(shown.splitlines()), "version 99" in shown) == (0, 5, True)
    told = json.loads(run("job", ID, "--journal", tmp_path, "--json")[1])
    assert "version 99" in told["results"][1]["unreadable"]


def long(tokens: int) -> RolloutResult:
    logprobs = np.full(tokens, -0.1, np.float32)
    logprobs[:3] = -9.0
    split = [Segment(3, tokens // 2), Segment(4, tokens - tokens // 2)]
    return sample(0, token_ids=np.arange(tokens), logprobs=logprobs, segments=split, in_place=(tokens // 2,))


def test_tokens_are_plain_where_nobody_wants_colours(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.outcome(long(32768), "me")
    for environment in ({}, {"NO_COLOR": "1"}):
        code, shown, _ = run("job", ID, "--journal", tmp_path, "--tokens", **environment)
        assert (code, "\x1b" in shown) == (0, False)
        assert "[version 3] 0 1 2 " in shown
        assert "31,268 tokens are left out" in shown
        assert "weights switched in place at tokens 16384" in shown
        assert len(shown) < 20_000


def test_tokens_are_coloured_by_version_and_marked_where_unlikely() -> None:
    shown = coloured(long(8), _letter)
    styles = {shown.plain[span.start : span.end]: str(span.style) for span in shown.spans}
    assert shown.plain == "[version 3] abcd[version 4] ef\ufffd<7>"
    assert (styles["a"], styles["d"], styles["e"]) == ("cyan reverse", "cyan", "magenta")


def _letter(token: int) -> str:
    return {6: "\x1b", 7: ""}.get(token, chr(97 + token))


def ask(url: str, question: Callable[[Broker], Awaitable[T]]) -> T:
    async def asked() -> T:
        async with connect(url) as client:
            return await question(Broker(client, "default"))

    return asyncio.run(asked())


def live(url: str) -> dict[str, Any]:
    code, shown, _ = run("job", ID, "--redis", url, "--json")
    assert code == 0
    return dict(json.loads(shown))


def test_a_job_of_a_live_pool(redis_db: str) -> None:
    job = GenerateJob(id=ID, token_ids=[5, 6, 7], n=4, sampling=SHORT, reply_to="me", priority="high", deadline_s=60)
    before = GenerateJob(id="b" * 32, token_ids=[1], reply_to="me", priority="high")
    ask(redis_db, lambda broker: broker.enqueue([before, job]))
    told = live(redis_db)
    assert (told["state"], told["ahead"], told["priority"], told["client"]) == ("queued", 1, "high", "me")
    assert told["job"]["token_ids"] == [5, 6, 7]

    async def work(broker: Broker) -> None:
        lease = Lease(broker.redis, "default", "w1", 600)
        await lease.join(status("w1"))
        assert len(await lease.claim(2, 100, 0)) == 2
        piece = Partial(start=0, token_ids=[1, 2, 3], logprobs=[-1.0] * 3, segments=[Segment(7, 3)])
        assert await lease.checkpoint([Piece(ID, 1, 2, 0, piece)]) == ["ok"]
        done = [Finished(ID, 1, number, result(job, number)) for number in (0, 1)]
        assert await lease.complete(done) == ["ok", "ok"]

    ask(redis_db, work)
    told = live(redis_db)
    assert (told["state"], told["worker"], told["attempt"], told["published"]) == ("running", "w1", 1, [0, 1])
    assert told["partials"] == {"2": {"tokens": 3, "versions": [7]}}
    _, shown, _ = run("job", ID, "--redis", redis_db)
    for line in ("running", "published: 2 samples (0 to 1)", "sample 2: 3 tokens saved", "prompt of 3 tokens"):
        assert line in shown
    escape = "ValueError: \x1b[31m"
    ask(redis_db, lambda broker: Lease(broker.redis, "default", "w1", 600).bury(ID, 1, "it broke", "host", escape))
    told = live(redis_db)
    assert (told["state"], told["dead_letter"]["cause"]) == ("dead", "it broke")
    _, shown, _ = run("job", ID, "--redis", redis_db)
    assert ("cause: it broke" in shown, "\x1b" in shown) == (True, False)


def test_what_a_queued_job_waits_for(redis_db: str) -> None:
    job = GenerateJob(id=ID, token_ids=[5], reply_to="me", min_version=9)

    async def pass_over(broker: Broker) -> None:
        await broker.enqueue([job])
        lease = Lease(broker.redis, "default", "w1", 600)
        await lease.join(status("w1"))
        assert await lease.claim(1, 1, 0) == []

    ask(redis_db, pass_over)
    told = live(redis_db)
    assert (told["state"], told["ahead"], told["waits"]) == ("queued", None, "weights version 9")


def test_what_a_job_waits_for_that_needs_another_engine(redis_db: str) -> None:
    job = GenerateJob(id=ID, token_ids=[5], reply_to="me", seed=3, sampling=SamplingParams(max_new_tokens=5000))

    async def pass_over(broker: Broker) -> None:
        able, plain = (Lease(broker.redis, "default", name, 600) for name in ("able", "plain"))
        able.can, plain.can = can_of(65536, ("seed",), True), can_of(4096, (), True)
        for lease in (able, plain):
            await lease.join(status(lease.worker_id))
        await broker.enqueue([job])
        assert await plain.claim(1, 1, 0) == []

    ask(redis_db, pass_over)
    assert live(redis_db)["waits"] == "a worker whose engine has generate, seed, and 5,001 tokens of context"


def test_a_lost_worker_is_said_to_be_lost(redis_db: str) -> None:
    async def lose(broker: Broker) -> None:
        await broker.enqueue([GenerateJob(id=ID, token_ids=[5], reply_to="me")])
        lease = Lease(broker.redis, "default", "w1", 600)
        await lease.join(status("w1"))
        assert await lease.claim(1, 1, 0)

    ask(redis_db, lose)
    assert live(redis_db)["waits"] == ""
    ask(redis_db, lambda broker: broker.redis.zadd(broker.keys.workers, {"w1": 1}))
    told = live(redis_db)
    assert (told["state"], told["waits"]) == ("running", "another worker: the lease of w1 has run out")


def test_a_damaged_record_is_shown_as_far_as_it_goes(redis_db: str) -> None:
    async def damage(broker: Broker) -> None:
        await broker.redis.hset(
            broker.keys.job(ID), mapping={"st": "r", "p": VERSION_PAST, "q": "x", "k0": b"?", "n": "many"}
        )

    ask(redis_db, damage)
    _, shown, _ = run("job", ID, "--redis", redis_db)
    assert ("running" in shown, "cannot be read" in shown) == (True, True)


def test_ids_that_nobody_knows(redis_db: str, tmp_path: Path) -> None:
    for more in (["--redis", redis_db], ["--journal", tmp_path]):
        code, _, said = run("job", "c" * 32, *more)
        assert (code, "ID='ccc" in said) == (2, True)
    assert run("job", "../x", "--redis", redis_db)[0] == 2
    assert "need --journal" in run("job", ID, "--tokens", "--redis", redis_db)[2]


def test_journal_between_two_times(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for at in (0.0, 3600.0, 7200.0):
            journal.add(Entry("note", at, ID, data={"at": at}))
        journal.note(ID, now=True)
    code, shown, _ = run("journal", tmp_path, "--since", "1970-01-01T00:30", "--until", "1970-01-01T02:00+00:00")
    assert (code, len(shown.splitlines())) == (0, 2)
    assert len(run("journal", tmp_path, "--since", "10m")[1].splitlines()) == 1
    assert len(run("journal", "show", tmp_path)[1].splitlines()) == 4
    code, _, said = run("journal", tmp_path, "--since", "yesterday")
    assert (code, "since='yesterday'" in said) == (2, True)
