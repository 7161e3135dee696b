"""What a bisect may look for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, InvalidField
from rolloutmq.ops.replay import Recorded, Settings, Verdict, compared, unverified
from rolloutmq.ops.replay.checks import bisect, by_version, metric, replays, users
from rolloutmq.sync.disk import folder_name


def sample(version: int, worker: str = "w1", more: tuple[int, ...] = (), **notes: Any) -> Recorded:
    job = GenerateJob(id=f"{version:032x}", token_ids=[5], n=1, reply_to="me")
    segments = [(one, 2) for one in (version, *more)]
    tokens = 2 * len(segments)
    fields: dict[str, Any] = {"token_ids": range(tokens), "logprobs": [-1.0] * tokens, "segments": segments}
    return Recorded(result(job, 0, worker_id=worker, **fields), job, 1.0, notes=notes)


def verdict(one: Recorded, first: int | None) -> Verdict:
    logprobs = np.array(one.result.logprobs)
    logprobs[len(logprobs) if first is None else first :] -= 1
    return compared(one, one.result.token_ids, logprobs)


def test_samples_are_taken_of_each_version_and_worker() -> None:
    samples = [sample(1, worker) for worker in ("w1", "w2", "w1", "w1")] + [sample(1, "w1", (2,))]
    assert {version: len(of) for version, of in by_version(samples, 2).items()} == {1: 3, 2: 1}
    assert {version: len(of) for version, of in by_version(samples, None).items()} == {1: 5, 2: 1}


def test_a_replay_breaks_at_the_version_of_the_first_difference() -> None:
    crossing = sample(3, "w1", (4,))
    samples = by_version([sample(2), crossing])
    broken = replays(samples, lambda chosen: [verdict(one, 2 if one is crossing else None) for one in chosen])
    assert [broken(version) for version in (2, 3, 4)] == [False, None, True]
    assert replays(samples, lambda chosen: [unverified(one, "gone") for one in chosen])(2) is None


def test_a_metric_is_a_mean_of_what_samples_have() -> None:
    samples = by_version([sample(version, reward=1.0 if version < 5 else 0.1) for version in range(1, 9)] + [sample(9)])
    found = bisect(list(samples), metric(samples, "reward", " 0.5"), also=list(samples))
    assert (found.good, found.broken, found.again) == (4, 5, ())
    assert len(found.tested) == 9
    assert found.tested[9] is None
    for name, below in (("nonsense", "0.5"), ("worker", "0.5"), ("reward", "nan"), ("reward", "x")):
        with pytest.raises(InvalidField, match="--by"):
            metric(samples, name, below)


def test_a_function_of_the_users_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours.py").write_text(
        "def holds(samples, path):\n    return int(path.name[1:]) < 3 and len(samples) == 1\n"
        "def fails(samples, path):\n    raise KeyError('x')\n"
        "def exits(samples, path):\n    raise SystemExit(0)\n"
        "def says(samples, path):\n    return 'yes'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for version in (1, 2, 3, 4):
        (tmp_path / "weights" / folder_name(version)).mkdir(parents=True)
    samples = by_version(map(sample, range(1, 6)))
    settings = Settings(model="model", snapshots=tmp_path / "weights")
    broken = users(samples, settings, "ours:holds")
    assert [broken(version) for version in samples] == [False, False, True, True, None]
    for name in ("ours:fails", "ours:exits", "ours:says"):
        with pytest.raises(InvalidField, match=r"--by.*version 2"):
            users(samples, settings, name)(2)
