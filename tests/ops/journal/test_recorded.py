"""Samples out of a journal: their facts, expressions over them, and the verdict on a replay."""

from __future__ import annotations

import tracemalloc
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from support.journals import Problems
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, InvalidField, RolloutResult, SamplingParams
from rolloutmq.messages.journal import SUFFIX, Journal
from rolloutmq.ops.replay import Recorded, Where, compared, recorded, unverified

MODULE = import_module("rolloutmq.ops.journal.recorded")  # the room's door has a function of this name


def sample(job: str, index: int = 0, **more: object) -> RolloutResult:
    asked = GenerateJob(id=job, token_ids=[5, 6], n=2, reply_to="me", group_id="g")
    return result(asked, index, **({"logprobs": [-0.5, -1.5]} | more))


def test_a_sample_is_put_together_from_its_entries(tmp_path: Path) -> None:
    job = GenerateJob(id="a" * 32, token_ids=[5, 6], n=2, sampling=SamplingParams(), reply_to="me", group_id="g")
    with Journal(tmp_path) as journal:
        journal.job(job)
        journal.outcome(sample(job.id), "me")
        journal.outcome(sample(job.id), "me")  # again, after a crash of the client
        journal.outcome(sample("b" * 32), "me")
        journal.note(job.id, run="night")
        journal.note((job.id, 0, 1), reward=-1.0)
        journal.note((job.id, 0, 1), reward=-2.0, staleness=3)
    first, second = recorded(tmp_path)
    assert (first.name, first.job, first.client_id) == (f"{job.id}.0", job, "me")
    assert first.prompt_ids is not None
    assert first.notes == {"run": "night", "reward": -2.0, "staleness": 3}
    assert (second.job, second.notes) == (None, {})
    chosen = recorded(tmp_path, where=Where("reward < 0 and staleness > 2 and run == 'night'"))
    assert [one.name for one in chosen] == [first.name]
    for name in (first.name, job.id):
        assert [one.name for one in recorded(tmp_path, jobs=[name])] == [first.name]
    assert not list(recorded(tmp_path, jobs=[f"{job.id}.1"])), "the job has another sample there"


def test_memory_is_bounded_by_what_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 jobs and notes of 16 KB each; one sample is chosen."""
    monkeypatch.setattr(MODULE, "BATCH", 8)
    monkeypatch.setattr(MODULE, "FIRST_BATCH", 8)
    with Journal(tmp_path) as journal:
        for number in range(400):
            job = GenerateJob(id=f"{number:032x}", token_ids=[70_000] * 3000, n=2, reply_to="me", group_id="g")
            journal.job(job)
            journal.outcome(sample(job.id), "me")
            journal.note((job.id, 0, 1), number=number, mask=np.ones(16_384, np.uint8))
            if number % 8 == 0:
                journal.flush()  # a block for each few, as when a run takes its time
    tracemalloc.start()
    try:
        (chosen,) = recorded(tmp_path, where=Where("number == 399"))
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
    assert (chosen.job is not None, chosen.notes["number"]) == (True, 399)


def test_damage_is_told_once_and_duplicates_far_apart_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "FIRST_BATCH", 1)
    names = [letter * 32 for letter in "abcdefa"]
    with Journal(tmp_path) as journal:
        for name in names:
            journal.outcome(sample(name), "me")
    (tmp_path / f"foreign{SUFFIX}").write_text("")
    problems = Problems()
    assert [one.result.job_id for one in recorded(tmp_path, on_problem=problems)] == names[:-1]
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("tokens == 3", True),
        ("'x' in prompt_name", False),  # no sample has that name
        ("reward > 1", False),
        ("abs(sample) + max(1, 2) == 2 and not versions == 9", True),
        ("worker in ('w', 'v') or attempt > 7", True),
    ],
)
def test_expressions(text: str, matches: bool) -> None:
    assert Where(text).matches({"tokens": 3, "sample": 0, "versions": 1, "worker": "w", "reward": None}) is matches


@pytest.mark.parametrize(
    "text",
    ["reward <", "", "x = 1", "__import__('os')", "job.__class__", "open('x')", "9**9**9", "'a' * 10**9", "1 / 0 > 1",
     "tokens < 'a'", "[x for x in job]", "lambda: 1", "{x: 1 for x in job}", "'%100000000d' % tokens",
     "f'{tokens:100000000d}' in job", "9**9999 > tokens", "2.5**9999 > 1", "(" * 500 + ")" * 500],
)  # fmt: skip
def test_what_is_no_expression_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidField, match="where"):
        Where(text).matches({"job": "j", "tokens": 1})


def test_a_verdict_says_the_first_difference() -> None:
    one = Recorded(sample("a" * 32), None, 1.0)
    tokens, logprobs = one.result.token_ids, one.result.logprobs
    assert logprobs is not None
    assert compared(one, tokens, logprobs).state == "same"
    assert compared(one, tokens, logprobs + np.float32(1e-3)).first == 0
    other = tokens.copy()
    other[-1] += 1
    found = compared(one, other, logprobs)
    assert (found.state, found.first, found.version) == ("differs", len(tokens) - 1, one.spans()[-1].version)
    skipped = np.arange(len(tokens)) < len(tokens) - 1
    part = compared(one, other, logprobs, replayed=skipped, unproved=["no snapshot"])
    assert (part.state, part.first, part.reasons) == ("unverified", None, ("no snapshot",))
    lost = compared(one, tokens, np.full_like(logprobs, np.nan))
    assert lost.state == "differs", "a missing log-probability proves nothing"
    assert compared(one, tokens, logprobs, finish="abort").state == "differs"
    nothing = unverified(one, "gone")
    assert (nothing.state, nothing.first, np.isnan(nothing.largest_gap)) == ("unverified", None, True)
