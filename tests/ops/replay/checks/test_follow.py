"""A follower of a journal scores every so many samples, and what it notes can be asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, InvalidField
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.journal import Journal, read
from rolloutmq.ops.replay import Recorded, Settings, Verdict, Where, compared, recorded, unverified
from rolloutmq.ops.replay.checks import Follower


@pytest.fixture(autouse=True)
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutmq.ops.replay.checks.follow.score", verdicts)


def arrive(journal: Journal, first: int, count: int) -> None:
    """Results of jobs with these numbers, two samples each."""
    for number in range(first, first + count):
        job = GenerateJob(id=f"{number:032x}", token_ids=[5, 6], n=2, reply_to="me")
        journal.job(job)
        fields: dict[str, Any] = {"token_ids": [7, 8], "logprobs": [-1.0, -2.0], "segments": [(1, 2)]}
        for sample in range(2):
            journal.outcome(result(job, sample, worker_id="w1", fingerprint={"dtype": "float32"}, **fields), "me")
    assert journal.flush(60)


def verdicts(samples: Iterable[Recorded], settings: Settings) -> list[Verdict]:
    """The third job is off by 0.25 at its second token, the fourth cannot be told."""
    found = []
    for one in samples:
        logprobs = np.array(one.result.logprobs)
        logprobs[1] += 0.25 if one.result.job_id.endswith("3") else 0
        same = compared(one, one.result.token_ids, logprobs, engine={"dtype": "float32"})
        found.append(unverified(one, "gone") if one.result.job_id.endswith("4") else same)
    return found


def test_every_second_sample_is_scored_and_noted(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        arrive(journal, 1, 1)  # before the follower
        follower = Follower(tmp_path, 2, Settings())
        assert not follower.round()
        arrive(journal, 2, 1)
        assert follower.round()
        assert not follower.round(), "nothing is scored twice"
        arrive(journal, 2, 3)  # the first of these comes again
        assert follower.round()
        follower.close()
    assert (follower.arrived, follower.states) == (6, {"same": 1, "differs": 1, "unverified": 1})
    assert follower.line().startswith("scored 3 of 6 samples: 1 same, 1 differs, 1 unverified; gaps: mean 6.2e-02")
    assert "worker w1 in version 1: largest gap 0.25" in follower.line()
    noted = {one.name: one.notes for one in recorded(tmp_path) if one.notes}
    assert {name[-3:]: dict(told) for name, told in noted.items()} == {
        "2.1": {"scored": "same", "score_gap": 0.0, "score_gap_mean": 0.0},
        "3.1": {"scored": "differs", "score_gap": 0.25, "score_gap_mean": 0.125},
        "4.1": {"scored": "unverified"},
    }
    assert [one.name[-3:] for one in recorded(tmp_path, where=Where("score_gap > 0.01"))] == ["3.1"]


def test_a_clock_that_is_ahead_hides_no_results(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        follower = Follower(tmp_path, 1, Settings())
        arrive(journal, 1, 1)
        ahead = next(iter(read(tmp_path, events="result")))
        journal.add(replace(ahead, job_id=f"{9:032x}", at=ahead.at + 86_400))
        assert journal.flush(60)
        follower.round()
        arrive(journal, 2, 1)
        follower.round()
        assert follower.arrived == 5
        assert not follower.round(), "nothing is scored twice"
        follower.close()


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="every"):
        Follower(tmp_path, 0, Settings())
    with pytest.raises(ConfigError):
        Follower(tmp_path / "nowhere", 1, Settings())
    assert not (tmp_path / "nowhere").exists()
