"""What a trainer's client writes into its journal, and what the commands show of it."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.pools.pool import worker
from support.specimens.messages import SHORT
from typer.testing import CliRunner

from rolloutmq import BlockingRolloutClient, GenerateJob, GroupRules, RolloutClient, Staleness
from rolloutmq.messages import Broker, ConfigError, encode
from rolloutmq.messages.journal import Journal, read
from rolloutmq.ops.cli.main import app


def run(*arguments: object) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, list(map(str, arguments)))
    return ended.exit_code, ended.stdout, ended.stderr


def tear(folder: Path) -> None:
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:200])


async def train(url: str, journal: Path) -> None:
    """Two prompts: of one a group is trained on, of the other it is dropped."""
    async with worker(url), RolloutClient(url, client_id="me", journal=journal) as client:
        feed = client.feed(Staleness(0, 4, "mark"))
        jobs = [GenerateJob(token_ids=[7, i], n=2, sampling=SHORT, metadata={"place": i}) for i in range(2)]
        async for batch in feed.batches(jobs, timeout=30):
            good, bad = batch
            good.rewards.extend([1.0, 0.5])
            feed.train([good], step=7)
            feed.drop([bad], "filtered")
            break


async def test_a_trainers_run_is_in_its_journal(redis_db: str, tmp_path: Path) -> None:
    await train(redis_db, tmp_path)
    entries = list(read(tmp_path))
    assert [entry.event for entry in entries] == ["job"] * 2 + ["result"] * 4 + ["note"] * 4 + ["consumed"] * 4
    told = [{(it.job_id, it.sample) for it in entries if it.event == event} for event in ("result", "consumed")]
    assert told[0] == told[1]
    (kept,) = {entry.job_id for entry in entries if entry.data.get("trained") == 7}
    (gone,) = {entry.job_id for entry in entries if entry.data.get("dropped") == "filtered"}
    assert {entry.job_id for entry in entries[:2]} == {kept, gone}
    notes = {
        (entry.sample, entry.data["reward"]) for entry in entries if entry.job_id == kept and entry.event == "note"
    }
    assert notes == {(0, 1.0), (1, 0.5)}
    assert all(entry.client_id == "me" for entry in entries if entry.event != "note")


async def test_what_a_checkpoint_knows_survives_the_trainer(redis_db: str, tmp_path: Path) -> None:
    """It is not generated or trained again, so nobody would write it into the journal any more."""
    journal = Journal(tmp_path, flush_s=3600.0)  # nothing is written before somebody asks for it
    async with worker(redis_db), RolloutClient(redis_db, journal=journal) as client:
        feed = client.feed(Staleness(0, 2, "mark"))
        async for batch in feed.batches([GenerateJob(token_ids=[7], n=2, sampling=SHORT)], timeout=30):
            feed.train(batch, step=0)
        assert list(read(tmp_path)) == []
        feed.state_dict()
        told = [entry.sample for entry in read(tmp_path, events="note") if entry.data["trained"] == 0]
        assert told == [0, 1]
        assert len(list(read(tmp_path, events="result"))) == 2
    journal.close()


async def test_what_a_feed_drops_by_itself_is_in_it_with_its_reason(redis_db: str, tmp_path: Path) -> None:
    """Surplus samples, those that a filter refuses, and groups that teach nothing: the trainer never sees them."""
    rules = GroupRules(
        over_sample=1, keep=lambda result: result.sample != 0, score=lambda results: [0.0] * len(results), teaches=any
    )
    async with worker(redis_db), RolloutClient(redis_db, journal=tmp_path) as client:
        feed = client.feed(Staleness(0, 4, "mark"), rules)
        jobs = [GenerateJob(token_ids=[7], n=2, sampling=SHORT)]
        async for _ in feed.batches(jobs, timeout=30):
            pytest.fail("a group that teaches nothing")
        dropped = feed.books.dropped
    fates = [entry.data["dropped"] for entry in read(tmp_path, events="note")]
    assert {why: fates.count(why) for why in set(fates)} == {why: count for why, count in dropped.items() if count}
    assert set(fates) == {"filtered"}


async def test_a_jobs_life_is_shown(redis_db: str, tmp_path: Path) -> None:
    await train(redis_db, tmp_path)
    kept = next(entry.job_id for entry in read(tmp_path) if entry.data.get("trained") == 7)
    code, shown, _ = run("job", kept, "--journal", tmp_path)
    assert code == 0
    for told in (kept, "accepted from me", "prompt of 2 tokens; n=2", "sample 0: 2 tokens", "version 0", "trained=7"):
        assert told in shown
    code, shown, _ = run("job", kept, "--journal", tmp_path, "--json")
    life = json.loads(shown)
    assert [result["sample"] for result in life["results"]] == [0, 1]
    assert life["accepted"]["message"]["token_ids"][0] == 7
    assert [note["data"]["reward"] for note in life["notes"]] == [1.0, 0.5]
    code, _, said = run("job", "unknown", "--journal", tmp_path)
    assert (code, "unknown" in said) == (2, True)


async def test_entries_are_listed(redis_db: str, tmp_path: Path) -> None:
    await train(redis_db, tmp_path)
    code, shown, said = run("journal", tmp_path, "--event", "result", "--version", 0, "--limit", 3, "--json")
    lines = [json.loads(line) for line in shown.splitlines()]
    assert (code, said, [line["event"] for line in lines]) == (0, "", ["result"] * 3)
    code, shown, _ = run("journal", tmp_path)
    assert len(shown.splitlines()) == 14
    assert run("journal", tmp_path, "--event", "smell")[0] == 2
    tear(tmp_path)
    code, shown, said = run("journal", tmp_path)
    assert (code, "midst of a block" in said) == (0, True)


def test_json_is_json(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.note("of", reward=math.nan, mask=[1.5, -math.inf])
    _, shown, _ = run("journal", tmp_path, "--json")
    assert json.loads(shown, parse_constant=pytest.fail)["data"] == {"reward": None, "mask": [1.5, None]}


def test_content_of_a_newer_release_is_left_out_of_its_line(tmp_path: Path) -> None:
    newer, older = (GenerateJob(token_ids=[1], reply_to="me") for _ in range(2))
    with Journal(tmp_path) as journal:
        journal.job(newer, b"\x02" + encode(newer)[1:])
        journal.job(older)
    code, shown, _ = run("journal", tmp_path)
    assert code == 0
    assert [(newer.id in line, "upgrade" in line) for line in shown.splitlines()] == [(True, True), (False, False)]
    _, shown, _ = run("journal", tmp_path, "--json")
    assert ["unreadable" in json.loads(line) for line in shown.splitlines()] == [True, False]
    assert run("job", newer.id, "--journal", tmp_path)[0] == 0


def test_a_journal_elsewhere_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    url = f"memory://{tmp_path.name}"
    with Journal(url) as journal:
        journal.note("of", mine=1)
    code, shown, said = run("journal", url)
    assert (code, said, "mine=1" in shown) == (0, "", True)
    MemoryFileSystem().rm(url, recursive=True)


async def test_what_the_pool_refused_is_not_in_it_and_failures_are(
    redis_db: str, broker: Broker, tmp_path: Path
) -> None:
    async with RolloutClient(redis_db, client_id="me", journal=tmp_path) as client:
        handle = await client.submit(token_ids=[1], sampling=SHORT)
        await client.submit(GenerateJob(id=handle.job_id, token_ids=[1], sampling=SHORT))
        await client.cancel([handle])
        await client.ending(handle, timeout=30)
    events = [(entry.event, entry.data.get("outcome")) for entry in read(tmp_path)]
    assert events == [("job", None), ("job", None), ("failure", "cancelled"), ("consumed", None)]


async def test_a_journal_of_ones_own_stays_open(redis_db: str, tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        async with worker(redis_db), RolloutClient(redis_db, journal=journal) as client:
            await client.generate([[1, 2]], SHORT, timeout=30)
        journal.note("of", mine=1)
        assert journal.flush(30)
        assert [entry.event for entry in read(tmp_path)] == ["job", "result", "consumed", "note"]


def test_without_zstandard_it_is_said(redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"rolloutmq\[journal\]"):
        BlockingRolloutClient(redis_db, journal=tmp_path)
