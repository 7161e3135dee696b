"""Reports of journals that lack much, or are damaged: what is not known is said, and a limit on it is not kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.journals import segments
from support.specimens.messages import SHORT
from support.specimens.messages import result as result_of
from typer.testing import CliRunner

from rolloutmq.messages import GenerateJob, JobFailure
from rolloutmq.messages.journal import Entry, Journal
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.dashboard import load

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e\ud800" + "9" * 5000


def report(*arguments: object) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return ended.exit_code, ended.stdout, ended.stderr


def test_a_clients_journal_alone_says_what_it_does_not_know(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for _ in range(4):
            job = GenerateJob(token_ids=[1], sampling=SHORT, reply_to="me")
            journal.job(job)
            journal.outcome(result_of(job, 0), "me")
    code, shown, _ = report(tmp_path)
    assert code == 0
    for words in (
        "4 jobs: 4 done",
        "no worker's journal is here",
        "no reward is noted",
        "no client wrote what it consumed",
    ):
        assert words in " ".join(shown.split())
    for limit in ("--max-idle-share", "--max-stale-share", "--max-deaths"):
        code, shown, _ = report(tmp_path, limit, 1)
        assert (code, "unknown" in shown) == (1, True), limit
    state = load(str(tmp_path)).state()
    assert [one["state"] for one in state["workers"].values()] == []
    assert len(state["lanes"]) == 1, "known from its results"


def test_failures_are_grouped_by_cause(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for n in range(30):
            job = GenerateJob(token_ids=[n], sampling=SHORT, reply_to="me")
            journal.job(job)
            failure = {"job_id": job.id, "group_id": job.id, "outcome": "dead", "cause": "engine request refused"}
            journal.outcome(JobFailure(**failure, error=f"token {n} of /models/{n}/x is out of range"), "me")
    (group,) = load(str(tmp_path)).state()["failures"]
    assert (group["count"], group["cause"]) == (30, "dead: engine request refused: token <n> of <path> is out of range")
    assert len(group["jobs"]) == 5
    code, shown, _ = report(tmp_path, "--max-failed-share", 0.5)
    assert (code, "30 dead: engine request refused" in " ".join(shown.split())) == (1, True)


def test_hostile_texts_and_numbers_harm_nobody(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        job = GenerateJob(token_ids=[1], sampling=SHORT, reply_to="me")
        journal.job(job)
        journal.outcome(
            result_of(job, 0, worker_id=HOSTILE[:60].replace("\ud800", ""), metadata={"m": "</script>"}), "me"
        )
        journal.note(job.id, sample=0, reward=float("nan"), staleness=-1e300, dropped=HOSTILE.replace("\ud800", ""))
        plain = HOSTILE.replace("\ud800", "")
        for what in ("joined", "left", "engine died", "command", plain):
            data = {"what": what, "worker": plain, "host": plain, "version": -7, "max_running": 1 << 62, "held": plain}
            journal.add(Entry("worker", 5e10, data=data))
        journal.add(
            Entry("weights", -5e10, versions=((1 << 62),), data={"what": "loaded", "worker": plain, "seconds": -1})
        )
        journal.add(Entry("weights", 1.0, versions=(3,), data={"what": "failed", "failures": {plain: [plain]}}))
        journal.add(Entry("attempt", 2.0, job.id, attempt=1 << 30, data={"what": "claimed", "samples": 1 << 60}))
    history = load(str(tmp_path))
    assert json.dumps(history.state())
    code, shown, _ = report(tmp_path)
    assert code == 0
    assert not {"\x1b", "\u202e"} & set(shown)
    assert max(map(len, shown.splitlines())) <= 100
    page = tmp_path / "page.html"
    ended = CliRunner().invoke(app, ["dashboard", "--journal", str(tmp_path), "--export", str(page)])
    assert ended.exit_code == 0, ended.output
    html = page.read_text()
    assert "<script>alert" not in html
    assert html.count("</script>") == 2


def test_a_torn_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for _ in range(2000):
            journal.job(GenerateJob(token_ids=[1] * 200, sampling=SHORT, reply_to="me"))
            journal.flush(5) if journal.written % 500 == 0 else None
    (file,) = segments(tmp_path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    code, shown, said = report(tmp_path)
    assert code == 0
    assert "problems of the files" in shown
    assert said


@pytest.mark.parametrize("make", [lambda _: None, lambda folder: folder.mkdir()])
def test_a_journal_that_is_not_there_or_empty_is_named(tmp_path: Path, make: object) -> None:
    make(tmp_path / "none")  # type: ignore[operator]
    code, _, said = report(tmp_path / "none")
    assert (code, "none" in said, said.count("\n")) == (2, True, 1)
