"""What results, failures and groups look like in a prompt or a notebook: one line, whatever is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolloutmq.messages.model import EmbedResult, JobFailure, RewardResult, RolloutResult, Segment
from rolloutmq.messages.shown import told_versions
from rolloutmq.producer import Group, TrainGroup

JOB = "0192f0c1a2b37c4d8e5f60718293a4b5"
HOSTILE = "<script>alert(1)</script>\x1b[2J\r\n\u202e\x00" * 50
PLACE: dict[str, Any] = {"job_id": JOB, "group_id": HOSTILE[:128], "worker_id": "w", "attempt": 1, "sample": 2, "n": 8}


def result(**fields: Any) -> RolloutResult:
    given: dict[str, Any] = {
        "token_ids": np.arange(4000, dtype=np.int32), "logprobs": np.zeros(4000, np.float32),
        "segments": (Segment(3, 1000), Segment(4, 3000)), "finish_reason": "length",
    }  # fmt: skip
    return RolloutResult(**PLACE, **given | fields)


def failure(cause: str = "no worker can run it") -> JobFailure:
    return JobFailure(job_id=JOB, outcome="dead", cause=cause, error=cause, attempts=3)


def test_a_result_in_one_line() -> None:
    expected = "<RolloutResult 0192f0c1…8293a4b5 sample 2 of 8: 4,000 tokens, versions 3-4, length>"
    assert repr(result()) == str(result()) == expected
    adapted = result(adapter="policy", adapter_version=7, text="Once\nupon")
    assert repr(adapted).endswith(r", adapter policy@7, length, 'Once\nupon'>")


def test_a_failure_and_results_of_tasks() -> None:
    assert repr(failure()) == (
        "<JobFailure 0192f0c1…8293a4b5 dead: 'no worker can run it', error 'no worker can run it', "
        "3 attempts, 0 samples published>"
    )
    embedded = EmbedResult(**PLACE, version=3, tokens=5, embedding=np.zeros(1024, np.float32))
    assert repr(embedded) == "<EmbedResult 0192f0c1…8293a4b5 input 2 of 8: 5 tokens, embedding (1024,), version 3>"
    rewarded = RewardResult(**PLACE, version=3, tokens=5, scores=np.zeros(2, np.float32))
    assert "scores (2,)" in str(rewarded)


def test_groups() -> None:
    group = Group("g1", (result(), result(finish_reason="stop")), (failure(),))
    assert repr(group) == "<Group g1: 2 results (1 length, 1 stop), 1 dead, 8,000 tokens, versions 3-4>"
    train = TrainGroup("g1", (result(),), (), number=12, samples=(0,), rewards=[0.25], staleness=(1,))
    assert repr(train).endswith("versions 3-4, prompt 12, mean reward 0.25, staleness up to 1>")
    assert repr(Group("g1", (), ())) == "<Group g1: 0 results, 0 tokens>"


@pytest.mark.parametrize(
    ("versions", "told"),
    [((), ""), ((7, 7), "version 7"), ((3, 4, 5), "versions 3-5"), ((3, 9), "versions 3-9 (2 of them)")],
)
def test_versions_as_a_range(versions: tuple[int, ...], told: str) -> None:
    assert told_versions(versions) == told


@pytest.mark.parametrize(
    "it",
    [
        result(text=HOSTILE, adapter=HOSTILE, adapter_version=1),
        failure(HOSTILE),
        Group(HOSTILE, (result(text=HOSTILE),), (failure(HOSTILE),)),
    ],
)
def test_hostile_texts_are_cut_and_escaped(it: object) -> None:
    """A notebook shows a repr as plain text; a terminal must not act on it."""
    assert repr(it).isprintable()
    assert len(repr(it)) < 500
    assert not hasattr(it, "_repr_html_")
