"""The demo's accounting: what is counted as lost, delivered twice, mixed or stale, and what fails a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from rolloutmq.messages import JobFailure, RolloutResult, Segment
from rolloutmq.ops.demo.learner import Learner
from rolloutmq.ops.demo.model import make_model, token_logprobs
from rolloutmq.ops.demo.summary import objections, summarise
from rolloutmq.ops.demo.tally import Tally
from rolloutmq.ops.demo.task import (
    ANSWER_TOKENS,
    EOS,
    NO_VERSION,
    PAD,
    PROMPT_TOKENS,
    ZERO,
    Problem,
    make_batch,
)
from rolloutmq.ops.demo.trainer import Step
from rolloutmq.producer import Group
from rolloutmq.sync.publish.publisher import PublishReport

PROBLEM = Problem((3, 1, 0, 2))


def result(job: str, sample: int, segments: list[tuple[int, int]], **fields: Any) -> RolloutResult:
    count = sum(tokens for _, tokens in segments)
    tokens = np.array([ZERO + i for i in range(count - 1)] + [EOS], np.int32)
    return RolloutResult(
        job_id=job,
        sample=sample,
        n=2,
        group_id=job,
        token_ids=tokens,
        logprobs=np.full(count, -0.5, np.float32),
        finish_reason="stop",
        segments=tuple(Segment(*segment) for segment in segments),
        worker_id=fields.pop("worker_id", "a"),
        attempt=fields.pop("attempt", 1),
        **fields,
    )


def test_tally_of_a_good_group() -> None:
    tally = Tally()
    tally.submitted("j", 2)
    assert (tally.jobs, tally.samples, tally.lost) == (1, 2, 2)
    results = (result("j", 0, [(3, 5)]), result("j", 1, [(3, 2), (4, 3)], worker_id="b", attempt=2))
    tally.received(Group("j", results, ()))
    assert (tally.lost, tally.duplicates, tally.mixed_version_samples, tally.redone, tally.tokens) == (0, 0, 1, 1, 10)
    assert tally.by_worker == Counter({"a": 1, "b": 1})
    assert tally.used(results, 5) == Counter({2: 7, 1: 3})
    assert tally.staleness_mean == pytest.approx(1.7)
    assert tally.staleness_max == 2


def test_tally_sees_what_is_missing_and_what_comes_twice() -> None:
    tally = Tally()
    tally.submitted("j", 2)
    tally.submitted("k", 2)
    failure = JobFailure(job_id="k", outcome="dead", cause="its worker died three times")
    tally.received(Group("j", (result("j", 0, [(0, 5)]), result("j", 0, [(0, 5)])), ()))
    tally.received(Group("k", (), (failure,)))
    assert (tally.duplicates, tally.lost, len(tally.failures), tally.tokens) == (1, 3, 1, 5)


def test_batch_lays_out_tokens_and_their_versions() -> None:
    batch = make_batch([(PROBLEM, [result("j", 0, [(3, 2), (4, 3)]), result("j", 1, [(4, 2)])])])
    assert batch.sequences[0].tolist() == [*PROBLEM.prompt.tolist(), ZERO, ZERO + 1, ZERO + 2, ZERO + 3, EOS]
    assert batch.sequences[1].tolist() == [*PROBLEM.prompt.tolist(), ZERO, EOS, PAD, PAD, PAD]
    assert batch.versions.tolist() == [[3, 3, 4, 4, 4], [4, 4, NO_VERSION, NO_VERSION, NO_VERSION]]
    assert batch.mask.sum() == 7
    assert batch.rewards.tolist() == [[[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]]
    assert batch.reward == pytest.approx((1 + 0.25) / 2)


def test_gap_compares_each_token_with_the_version_that_sampled_it() -> None:
    learner = Learner(make_model(0), steps=10)
    batch = make_batch([(PROBLEM, [result("j", 0, [(0, 5)]), result("j", 1, [(0, 2), (1, 2)])])])
    first = token_logprobs(learner.model, batch.sequences)[:, PROMPT_TOKENS - 1 :].detach()
    learner.step(batch)
    second = token_logprobs(learner.model, batch.sequences)[:, PROMPT_TOKENS - 1 :].detach()
    assert not torch.allclose(first, second, atol=1e-4)
    batch.behaviour.copy_(torch.where(batch.versions == 0, first, second))
    gaps = learner.logprob_gaps(batch)
    assert gaps.shape == (ANSWER_TOKENS + 4,)
    assert gaps.max() < 1e-5
    batch.behaviour.copy_(second)  # as if every token had been sampled by version 1
    assert learner.logprob_gaps(batch).max() > 1e-4


def step(number: int, reward: float) -> Step:
    return Step(number, number * 1.0, reward, 0.0, Counter({1: 10}), number * 100, 0.1, 0.02, 10)


def summary(**changes: Any) -> dict[str, Any]:
    tally = Tally()
    tally.submitted("j", 2)
    tally.received(Group("j", (result("j", 0, [(0, 5)]), result("j", 1, [(0, 2), (1, 3)])), ()))
    reports = [PublishReport(1, "committed", ("a",)), PublishReport(2, "superseded"), PublishReport(3, "committed")]
    return (
        summarise(
            [step(i, 0.2 if i <= 10 else 0.9) for i in range(1, 21)],
            tally,
            reports,
            {"steps": 18, "seconds": 2.0, "reward": 0.28},
            seconds_setup=20.0,
            seconds_training=20.0,
            worker_killed=True,
            worker_joined_late=True,
        )
        | changes
    )


def test_summary_has_what_the_run_measured() -> None:
    it = summary()
    assert (it["reward_first"], it["reward_last"], it["steps"]) == (0.2, 0.9, 20)
    assert (it["versions_published"], it["versions_superseded"], it["versions_failed"]) == (2, 1, 0)
    assert (it["jobs"], it["samples"], it["lost"], it["duplicates"], it["mixed_version_samples"]) == (1, 2, 0, 0, 1)
    assert it["logprob_gap_mean"] == pytest.approx(0.002)
    assert it["tokens_per_second"] == 0.5
    assert objections(it) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"lost": 1}, "never came back"),
        ({"duplicates": 2}, "more than once"),
        ({"segments_that_do_not_add_up": 1}, "do not add up"),
        ({"logprob_gap_mean": 0.5}, "differ by 0.5"),
        ({"logprob_gap_mean": None}, "differ"),
        ({"versions_published": 0}, "no weights version"),
        ({"worker_killed": False}, "killed worker"),
        ({"worker_joined_late": False}, "delivered nothing"),
    ],
)
def test_what_fails_a_run_is_said_in_words(changes: dict[str, Any], word: str) -> None:
    (objection,) = objections(summary(**changes))
    assert word in objection
