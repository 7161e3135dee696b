"""The pool's figures in the logs of TRL's trainers, and in the event files that TensorBoard reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.event_files import scalars
from support.lazily import Lazily

from rolloutmq import BlockingRolloutClient, RedisUnavailable

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.usefixtures("trl_worker")]
made, pool = Lazily("support.trainers.trl"), Lazily("rolloutmq.producer.trl")


def column(trainer: Any, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


def test_of_the_asynchronous_trainer(
    tiny: Path, trl_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer, worker, _ = made.async_trainer(
        tiny, tmp_path, trl_redis, max_steps=4, logging_steps=2, report_to=["tensorboard"]
    )
    trainer.add_callback(pool.PoolFigures(worker))
    trainer.train()
    assert column(trainer, "rollout/trained") == [16, 32], "as it is when TRL logs, and no mean of several steps"
    assert column(trainer, "rollout/workers/count") == [1, 1]
    assert column(trainer, "rollout/sync/failures")[-1:] == [0]
    assert len(column(trainer, "rollout/staleness/mean")) == 2
    assert column(trainer, "rollout/queue/normal")
    shown = scalars(tmp_path / "board")
    assert shown["train/rollout/trained"] == [(2, 16), (4, 32)]
    assert shown["train/rollout/dropped/failed"] == [(2, 0), (4, 0)]


def test_of_the_trainer_in_step(
    tiny: Path, trl_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no books. A Redis that does not answer when TRL logs costs figures, and no training."""
    trainer, rollouts = made.grpo_trainer(tiny, tmp_path, trl_redis, max_steps=3)

    def gone(_: BlockingRolloutClient) -> None:
        raise RedisUnavailable("it does not answer")

    trainer.add_callback(made.At(3, lambda: monkeypatch.setattr(BlockingRolloutClient, "load", gone)))
    trainer.add_callback(pool.PoolFigures(rollouts))
    trainer.train()
    rollouts.close()
    assert column(trainer, "rollout/workers/count") == [1, 1], "the third time it did not"
    assert "no figures of queue and workers: it does not answer" in caplog.text
    assert len(column(trainer, "rollout/sync/seconds")) == 3
    assert not column(trainer, "rollout/trained")
    assert trainer.state.global_step == 3
