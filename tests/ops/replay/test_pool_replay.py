"""Replay against a live pool: what is submitted, what is compared, and what is no proof."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from support.pools.pool import worker
from support.specimens.messages import result
from typer.testing import CliRunner

from rolloutmq.messages import GenerateJob, JobFailure, Segment, connect, new_id
from rolloutmq.messages.journal import Journal
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.replay import Recorded, Verdict, recorded
from rolloutmq.ops.replay.pool import client_of, judged, replayed, resubmitted
from rolloutmq.producer import RolloutClient
from rolloutmq.worker.scripted.engine import ScriptedEngine

FIXED = {"temperature": 0.0, "max_new_tokens": 8}
SEEN = {"engine": "e", "device": "cpu", "deterministic": "yes"}


async def record(url: str, folder: Path, jobs: list[GenerateJob]) -> None:
    """Run jobs in a pool, with a journal."""
    async with worker(url, engine=ScriptedEngine(echo=True)), RolloutClient(url, journal=folder) as client:
        await client.submit_many(jobs)
        async for outcome in client.results(timeout=60):
            assert not isinstance(outcome, JobFailure)


async def replay(url: str, samples: list[Recorded], replay_id: str) -> dict[str, Verdict]:
    async with RolloutClient(url, client_id=client_of(replay_id)) as client:
        return {one.recorded.name: one async for one in replayed(client, samples, replay_id, window=4, timeout=60)}


async def test_each_sample_is_generated_again_and_compared(redis_db: str, tmp_path: Path) -> None:
    greedy = [GenerateJob(id=new_id(), token_ids=[5, 6 + i], n=2, sampling=FIXED) for i in range(6)]
    drawn = GenerateJob(id=new_id(), token_ids=[7, 8], sampling={"max_new_tokens": 8})
    await record(redis_db, tmp_path, [*greedy, drawn])
    samples = list(recorded(tmp_path))
    nowhere = Recorded(samples[0].result, None, 1.0)
    replay_id = new_id()
    async with worker(redis_db, engine=ScriptedEngine(echo=True)), connect(redis_db) as db:
        found = await replay(redis_db, [one for one in samples if one.result.sample == 0], replay_id)
        assert [found[f"{job.id}.0"].state for job in greedy] == ["same"] * 6
        random = found[f"{drawn.id}.0"]
        assert (random.state, random.first) == ("unverified", None)
        assert random.reasons == ("no seed: its tokens were drawn at random",)
        accepted = int(await db.hget("rmq:{default}:load", "accepted"))
        assert accepted == 2 * 7  # jobs, with both samples of each
        # Once more under the same id: these jobs have ended, and nothing is generated again.
        again = await replay(redis_db, [samples[0]], replay_id)
        assert int(await db.hget("rmq:{default}:load", "accepted")) == accepted
        assert "took its replay" in again[samples[0].name].reasons[0]
        lost = await replay(redis_db, [nowhere], new_id())
        assert "does not have its job" in lost[nowhere.name].reasons[0]


def test_what_is_submitted() -> None:
    job = GenerateJob(
        id=new_id(), reply_to="trainer", token_ids=[1, 2], n=3, seed=7, sampling=FIXED, priority="high", deadline_s=1.0,
        min_version=9, max_staleness=0, group_id="g", session_id="s", prefer_worker="w", stream=True, trace_id="t",
        metadata={str(i): i for i in range(64)},
    )  # fmt: skip
    replay_id = new_id()
    again = resubmitted(job, replay_id)
    assert again == resubmitted(job, replay_id)
    assert len({job.id, again.id, resubmitted(job, new_id()).id}) == 3
    same = {"token_ids": [1, 2], "n": 3, "seed": 7, "sampling": FIXED}
    expected = GenerateJob(id=again.id, **same, priority="low", metadata={"replayed_from": job.id})
    assert again == expected


@pytest.mark.parametrize(
    ("more", "state", "says"),
    [
        ({}, "same", ""),
        ({"segments": (Segment(9, 2),)}, "unverified", "other weights: the pool sampled with version 9, the journal"),
        ({"segments": (Segment(9, 2),), "token_ids": [9, 9]}, "differs", "other weights"),
        (
            {"fingerprint": {"engine": "e", "device": "cuda", "deterministic": "yes"}},
            "unverified",
            "another device: cuda in the pool, cpu in",
        ),
        ({"fingerprint": {"engine": "e", "device": "cpu"}}, "same", ""),
        ({"fingerprint": {"engine": "e", "device": "cpu"}, "token_ids": [3, 5]}, "differs", "depended on its batch"),
        ({"prompt_ids": [4]}, "unverified", "another prompt"),
        ({"logprobs": [-0.5, -1.6]}, "differs", ""),
        ({"logprobs": None}, "differs", ""),
        ({"token_ids": [3], "logprobs": [-0.5], "segments": (Segment(3, 1),)}, "differs", ""),
        (
            {"token_ids": [3, 4, 5], "logprobs": [-0.5, -1.5, 0.0], "segments": (Segment(3, 3),)},
            "differs",
            "the replay has 3",
        ),
        ({"finish_reason": "length"}, "differs", "the replay ended with 'length', the recorded sample with 'stop'"),
    ],
)
def test_a_comparison_says_what_it_proves(more: dict[str, object], state: str, says: str) -> None:
    job = GenerateJob(id=new_id(), token_ids=[1], seed=7, reply_to="me")
    base = {
        "token_ids": [3, 4], "logprobs": [-0.5, -1.5], "segments": (Segment(3, 2),), "finish_reason": "stop",
        "fingerprint": SEEN, "prompt_ids": [1],
    }  # fmt: skip
    one = Recorded(result(job, 0, **base), job, 1.0)
    verdict = judged(one, result(job, 0, **(base | more)))
    assert verdict.state == state
    assert says in " ".join(verdict.reasons)
    assert bool(verdict.reasons) is bool(says)
    stopped = Recorded(result(job, 0, **(base | {"finish_reason": "abort"})), job, 1.0)
    longer = {"token_ids": [3, 4, 5], "logprobs": [-0.5, -1.5, 0.0], "segments": (Segment(3, 3),)}
    assert judged(stopped, result(job, 0, **(base | longer))).state == "same"


async def test_the_command_replays_in_a_pool(redis_db: str, tmp_path: Path) -> None:
    jobs = [
        GenerateJob(id=new_id(), token_ids=[5, 6], sampling=sampling) for sampling in (FIXED, {"max_new_tokens": 4})
    ]
    await record(redis_db, tmp_path, jobs)
    arguments = ["replay", "tokens", "--journal", str(tmp_path), "--pool", "default", "--redis", redis_db, "--json"]
    async with worker(redis_db, engine=ScriptedEngine(echo=True)):
        both = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        one = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, jobs[0].id])
    assert [both.exit_code, one.exit_code] == [1, 0], both.output + one.output
    *verdicts, last = map(json.loads, both.stdout.splitlines())
    assert {line["sample"]: line["state"] for line in verdicts} == {
        f"{jobs[0].id}.0": "same",
        f"{jobs[1].id}.0": "unverified",
    }
    assert last["summary"]["samples"] == 2


async def test_the_command_writes_a_report_and_knows_a_threshold(redis_db: str, tmp_path: Path) -> None:
    jobs = [GenerateJob(id=new_id(), token_ids=[5, 6 + i], sampling=FIXED) for i in range(2)]
    await record(redis_db, tmp_path / "first", jobs)
    with Journal(tmp_path / "changed") as journal:
        for one in recorded(tmp_path / "first"):
            assert one.job is not None
            journal.job(one.job)
            changed = one.result.token_ids + (one.result.job_id == jobs[0].id)
            journal.outcome(one.result.model_copy(update={"token_ids": changed}), "me")
    page = tmp_path / "out" / "report.html"
    arguments = ["replay", "tokens", "--journal", str(tmp_path / "changed"), "--pool", "default", "--redis", redis_db]
    arguments += ["--html", str(page), "--json", "--threshold"]
    async with worker(redis_db, engine=ScriptedEngine(echo=True)):
        above = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "0.4"])
        below = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "0.5"])
    assert [above.exit_code, below.exit_code] == [1, 0], above.output + below.output
    report = json.loads(above.stdout.splitlines()[-1])["report"]
    assert report["states"] == {"same": 1, "differs": 1, "unverified": 0}
    assert [row["job"] for row in report["listed"]] == [jobs[0].id, jobs[1].id]
    (told,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', page.read_text())
    assert json.loads(told)["replay"]["states"] == report["states"]
