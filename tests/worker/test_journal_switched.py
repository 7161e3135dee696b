"""`rolloutmq control journal`: a worker's journal begins and ends while the worker serves."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support.journals import Problems, segments
from support.pools.commanded import all_done, busy, hurry, slow
from support.pools.pool import eventually, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker, InvalidField
from rolloutmq.messages.journal import Entry, read, remote
from rolloutmq.ops.replay.checks.schedule import schedule_of
from rolloutmq.producer.control import PoolControl
from rolloutmq.worker import journaling


def whole(folder: Path | str) -> list[Entry]:
    """The journal's entries; its segments have no damage, and an end."""
    problems = Problems()
    entries = list(read(folder, on_problem=problems))
    assert problems == []
    return entries


def told(entries: list[Entry], event: str = "attempt") -> list[str]:
    return [entry.data["what"] for entry in entries if entry.event == event]


async def test_it_begins_with_who_writes_and_what_is_held(
    redis_db: str, control: PoolControl, broker: Broker, tmp_path: Path
) -> None:
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        (begun,) = (await control.journal("on", str(tmp_path))).check().results.values()
        assert (begun["folder"], begun["lost"]) == (str(tmp_path), 0)
        assert begun["entries"] >= 4  # they are in the file when the answer comes
        first, *claims = list(read(tmp_path, on_problem=Problems()))[:4]
        status = running.worker._status()
        assert (first.event, first.data["what"], first.data["worker"]) == ("worker", "present", running.id)
        assert (first.data["pid"], first.data["version"], first.data["model"]) == (os.getpid(), 0, status.model)
        assert {(entry.job_id, entry.attempt, entry.data["what"]) for entry in claims} == {
            (one.id, 1, "claimed") for one in jobs
        }
        assert all(entry.at < first.at and entry.data["held_s"] > 0 for entry in claims)
        hurry(running)
        await all_done(broker, jobs)
        (ended,) = (await control.journal("off")).check().results.values()
        assert (ended["folder"], ended["entries"], ended["lost"]) == (str(tmp_path), len(whole(tmp_path)), 0)
        await broker.enqueue([jobs[0].model_copy(update={"id": "f" * 32})])
        await eventually(lambda: broker.count_replies("client"), what="a job that nobody writes down")
    entries = whole(tmp_path)
    assert told(entries, "worker") == ["present", "command"]  # the one that switched it on
    assert "f" * 32 not in {entry.job_id for entry in entries}
    of = schedule_of(entries)
    assert (of.workers[running.id].attempts, list(of.violations)) == (3, [])


async def test_on_again_is_the_same_and_elsewhere_is_refused(
    redis_db: str, control: PoolControl, tmp_path: Path
) -> None:
    async with worker(redis_db) as running:
        for _ in range(2):
            (await control.journal("on", str(tmp_path / "a"))).check()
        assert len(segments(tmp_path / "a")) == 1
        assert (await control.journal("on", f"{tmp_path}/b/../a/")).ok
        (refused,) = (await control.journal("on", str(tmp_path / "b"))).failed
        assert (refused.kind, str(tmp_path / "a") in refused.error) == ("RequestRefused", True)
        assert not (tmp_path / "b").exists()
        for _ in range(2):
            assert (await control.journal("off")).ok
        (await control.journal("on", str(tmp_path / "b"))).check()
        name = running.id
    assert told(whole(tmp_path / "b"), "worker") == ["present", "command", "left"]  # its end completes it
    assert {entry.data["worker"] for entry in whole(tmp_path / "b")} == {name}


async def test_a_folder_that_cannot_be_written_is_the_answer_and_the_worker_goes_on(
    redis_db: str, control: PoolControl, broker: Broker, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    async with worker(redis_db, journal=str(tmp_path / "settings")) as one, worker(redis_db) as other:
        answers = await control.journal("on", str(tmp_path / "file"))
        kinds = {name: answer.kind for name, answer in answers.items()}
        assert kinds == {one.id: "RequestRefused", other.id: "ConfigError"}
        assert "Not a directory" in answers[other.id].error or "File exists" in answers[other.id].error
        (answer,) = (await control.journal("on", "nowhere://x", worker_id=other.id)).failed
        assert answer.kind == "ConfigError"
        (await control.journal("on", str(tmp_path / "settings"))).check()
        jobs = [job(sampling=SHORT) for _ in range(3)]
        await broker.enqueue(jobs)
        await all_done(broker, jobs)
    written = [entry for entry in whole(tmp_path / "settings") if entry.event == "attempt"]
    assert {entry.job_id for entry in written} == {one.id for one in jobs}


async def test_a_worker_that_ends_as_a_journal_is_opened_completes_it(
    redis_db: str, control: PoolControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, opening, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def held_up(folder: str) -> journaling.Journal:
        loop.call_soon_threadsafe(opening.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
        return journal(folder)

    journal = journaling.Journal
    monkeypatch.setattr(journaling, "Journal", held_up)
    async with worker(redis_db) as running:
        asked = asyncio.create_task(control.journal("on", str(tmp_path)))
        await opening.wait()
        stopping = asyncio.create_task(running.stop())
        (answer,) = (await asked).failed
        assert answer.kind == "WorkerLeaves"
        go_on.set()
        await stopping
    assert whole(tmp_path) == []  # with an end, and nobody's lock


async def test_what_is_lost_is_told(redis_db: str, control: PoolControl, tmp_path: Path) -> None:
    async with worker(redis_db):
        (await control.journal("on", str(tmp_path))).check()
        (there,) = (await control.journal("on", str(tmp_path))).check().results.values()
        segments(tmp_path)[0].unlink()
        (ended,) = (await control.journal("off")).check().results.values()
    assert ended["lost"] >= there["entries"] >= 2
    entries = whole(tmp_path)
    assert ended["entries"] == len(entries) > 0
    assert sum(entry.data["entries"] for entry in entries if entry.event == "lost") == ended["lost"]


async def test_a_journal_at_a_url_is_there_when_it_has_ended(
    redis_db: str, control: PoolControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path))
    url = f"memory://{tmp_path.name}"
    async with worker(redis_db):
        for _ in range(2):
            (await control.journal("on", url)).check()
            (ended,) = (await control.journal("off")).check().results.values()
            assert (ended["folder"], ended["lost"], "not_uploaded" in ended) == (url, 0, False)
        (await control.journal("on", url)).check()
        monkeypatch.setattr(remote, "_is_whole", lambda _: False)
        (ended,) = (await control.journal("off")).check().results.values()
        assert ended["not_uploaded"] == 1
    assert told(whole(url), "worker") == ["present", "command"] * 2


async def test_a_switch_that_makes_no_sense_is_not_sent(control: PoolControl) -> None:
    for switch, folder, allowed in (
        ("on", "", "absolute"), ("on", "relative", "absolute"), ("off", "/a", "none with off"), ("of", "/a", "'off'"),
    ):  # fmt: skip
        with pytest.raises(InvalidField, match=allowed):
            await control.journal(switch, folder)  # type: ignore[arg-type]
