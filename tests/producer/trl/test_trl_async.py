"""AsyncGRPOTrainer over real workers: it trains, its samples are accounted for, and its worker ends as it should."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lazily import Lazily
from support.pools.worker_process import WorkerProcess

from rolloutmq.messages.errors import ConfigError, InvalidField, JobFailed, RolloutMQError
from rolloutmq.messages.model import JobFailure
from rolloutmq.producer.training import Staleness

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.usefixtures("trl_worker")]
made, turns = Lazily("support.trainers.trl"), Lazily("rolloutmq.producer.trl.turns")
GAP = 1e-4
"""Of a log-probability in float32."""


@pytest.mark.slow
def test_a_killed_worker_costs_no_sample(
    tiny: Path, trl_redis: str, second_worker: WorkerProcess, tmp_path: Path
) -> None:
    account = made.Account()
    trainer, worker, weights = made.async_trainer(
        tiny, tmp_path, trl_redis, max_steps=6, gradient_accumulation_steps=2, max_staleness=1, join_timeout_s=2.0,
        callbacks=[made.At(2, second_worker.kill)],
    )  # fmt: skip
    account.watch(weights, worker)
    trainer.train()
    books = worker.books
    books.check()
    keys = [sample.key for sample in account.samples]
    assert books.trained == 6 * 16
    assert books.accepted == books.trained + books.dropped.total() + books.in_flight
    assert max(Counter(keys).values()) == 1
    assert 0 <= len(keys) - 6 * 16 - books.dropped["stale"] <= 8, "at most one micro-batch that TRL had read ahead"
    numbers = {number for number, _ in keys}
    assert set(range(max(numbers))) - numbers <= books.prompts.keys(), "what did not come is still in flight"
    gaps = account.logprob_gaps(tiny)
    assert len(gaps) >= 3
    assert max(gaps.values()) <= GAP, gaps
    for sample in account.samples:
        assert sample.versions is not None
        assert np.array_equal(sample.versions >= 0, sample.completion_mask == 1)
    assert max(books.staleness) <= 1


def test_tools_and_environments_are_trls_own(tiny: Path, trl_redis: str, tmp_path: Path) -> None:
    """Each conversation has two turns: a random model calls nothing, so its tokenizer says that it did."""
    account = made.Account()
    trainer, worker, weights = made.async_trainer(
        tiny, tmp_path, trl_redis, max_steps=2, environment_factory=made.Library, max_tool_calling_iterations=1,
        tokenizer=made.calling_tokenizer(tiny),
    )  # fmt: skip
    account.watch(weights, worker)
    trainer.train()
    assert account.samples
    for sample in account.samples:
        assert sample.metrics["rewards/Library"] == 1.0
        assert sample.metrics["tools/call_frequency"] == 1.0
        assert sample.versions is not None
        assert np.array_equal(sample.versions >= 0, sample.completion_mask == 1)
    assert max(account.logprob_gaps(tiny).values()) <= GAP


def test_what_is_wrong_is_said(tiny: Path, trl_redis: str, tmp_path: Path) -> None:
    trainer, worker, weights = made.async_trainer(tiny, tmp_path, trl_redis)
    with pytest.raises(InvalidField, match="staleness"):
        type(worker)(weights, str(tiny), trainer.args, [], made.fourths, staleness=Staleness(9, 8))
    with pytest.raises(ConfigError, match=r"callbacks=\[worker\]"):
        worker.start()
    with pytest.raises(RolloutMQError, match="does not run"):
        worker.check_health(1.0)


def test_a_reward_function_that_raises_ends_training_with_its_error(tiny: Path, trl_redis: str, tmp_path: Path) -> None:
    def broken(**_columns: Any) -> list[float]:
        raise ZeroDivisionError("no reward")

    trainer, worker, _ = made.async_trainer(tiny, tmp_path, trl_redis, rewards=broken)
    poll_soon(trainer)
    with pytest.raises(RolloutMQError, match="no reward") as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(RolloutMQError):
        worker.check_health(60.0)


def poll_soon(trainer: Any) -> None:
    """TRL looks at the health of its worker every five seconds without a sample."""
    make = trainer.get_train_dataloader

    def made() -> Any:
        loader = make()
        trainer._rollout_dataset.poll_interval_s = 0.05
        return loader

    trainer.get_train_dataloader = made


def test_one_failed_sample_costs_that_sample(
    tiny: Path, trl_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = turns.Turns.ask

    async def ask_but_one(self: Any, conversation: Any, prompt_ids: Any, **bounds: Any) -> Any:
        if (conversation.number, conversation.sample) == (1, 2):
            raise JobFailed(JobFailure(job_id="0" * 32, outcome="dead", cause="poison"))
        return await ask(self, conversation, prompt_ids, **bounds)

    monkeypatch.setattr(turns.Turns, "ask", ask_but_one)
    seen: list[int] = []

    def rewards(completion_ids: list[list[int]], place: list[int], **_columns: Any) -> list[float]:
        assert len(completion_ids) == len(place)
        seen.append(len(place))
        return made.fourths(completion_ids)

    account = made.Account()
    trainer, worker, weights = made.async_trainer(tiny, tmp_path, trl_redis, rewards=rewards, max_steps=2)
    account.watch(weights, worker)
    trainer.train()
    assert sorted(set(seen)) == [3, 4]
    assert worker.books.dropped["failed"] == 1
    assert worker.books.fate(1, 2) == "dropped: failed"
    assert (1, 2) not in {sample.key for sample in account.samples}


def test_stop_waits_for_no_conversation(
    tiny: Path, trl_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training ends while a tool of the user's hangs."""
    monkeypatch.setattr("rolloutmq.producer.trl.worker.STOP_S", 0.1)
    hanging, go_on = threading.Event(), threading.Event()

    class Slow:
        def reset(self, **_row: Any) -> None: ...

        def look_up(self, word: str) -> str:
            """Look a word up.

            Args:
                word: the word
            """
            hanging.set()
            go_on.wait()
            return word

        def get_reward(self) -> float:
            return 1.0

    trainer, worker, weights = made.async_trainer(
        tiny, tmp_path, trl_redis, environment_factory=Slow, tokenizer=made.calling_tokenizer(tiny)
    )
    worker.on_train_begin(trainer.args, trainer.state, trainer.control)
    weights.init_weight_transfer()
    weights.send_weights(trainer._streaming_iter())
    worker.update_model_version(1)
    worker.start()
    thread = worker._thread
    assert thread is not None
    assert hanging.wait(60)
    assert worker.check_health(60.0) is True
    worker.stop()
    go_on.set()
    thread.join()
    weights.destroy()
    with pytest.raises(RolloutMQError, match="does not run"):
        worker.check_health(60.0)
