"""Samples out of a journal: their facts, expressions over them, and the verdict on a replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, InvalidField, RolloutResult, SamplingParams
from rolloutmq.messages.journal import Journal
from rolloutmq.ops.replay import Limits, Recorded, Where, compared, recorded, unverified


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
     "tokens < 'a'", "[x for x in job]", "lambda: 1", "(" * 500 + ")" * 500],
)  # fmt: skip
def test_what_is_no_expression_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidField, match="where"):
        Where(text).matches({"job": "j", "tokens": 1})


def test_a_verdict_says_the_first_difference() -> None:
    one = Recorded(sample("a" * 32), None, 1.0)
    tokens, logprobs = one.result.token_ids, one.result.logprobs
    assert logprobs is not None
    assert compared(one, tokens, logprobs, Limits()).state == "same"
    assert compared(one, tokens, logprobs + np.float32(1e-3), Limits()).first == 0
    other = tokens.copy()
    other[-1] += 1
    found = compared(one, other, logprobs, Limits())
    assert (found.state, found.first, found.version) == ("differs", len(tokens) - 1, one.spans()[-1].version)
    skipped = np.arange(len(tokens)) < len(tokens) - 1
    part = compared(one, other, logprobs, Limits(), replayed=skipped, unproved=["no snapshot"])
    assert (part.state, part.first, part.reasons) == ("unverified", None, ("no snapshot",))
    lost = compared(one, tokens, np.full_like(logprobs, np.nan), Limits())
    assert lost.state == "differs", "a missing log-probability proves nothing"
    assert compared(one, tokens, logprobs, Limits(), finish="abort").state == "differs"
    nothing = unverified(one, "gone")
    assert (nothing.state, nothing.first, np.isnan(nothing.largest_gap)) == ("unverified", None, True)
