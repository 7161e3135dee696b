"""A trainer that crashes again and again, and resumes each time: the books of its last checkpoint go on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from support.lazily import Lazily

from rolloutmq.messages.redis import Keys

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.usefixtures("trl_worker")]
made, turns = Lazily("support.trainers.trl"), Lazily("rolloutmq.producer.trl.turns")
saving = Lazily("transformers.trainer_utils")
CLIENT = "resumed"


class Crash(Exception):
    """Ends a trainer between two steps."""


def crash() -> None:
    raise Crash


@pytest.mark.slow
def test_three_crashes_train_every_sample_once(
    tiny: Path, trl_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after every second step; it crashes after steps 3, 4 and 7, each time before it saves."""
    history: dict[int, list[tuple[int, int]]] = {}
    attempts = Counter[int]()
    make = turns.Turns._job

    def job(self: Any, conversation: Any, prompt_ids: Any, attempt: int, bounds: Any) -> Any:
        attempts[attempt] += 1
        return make(self, conversation, prompt_ids, attempt, bounds)

    monkeypatch.setattr(turns.Turns, "_job", job)
    books, asked = None, Counter[str]()
    for crash_at in (3, 4, 7, None):
        account = made.Account()
        trained = made.Trained(account)
        callbacks = [trained] if crash_at is None else [trained, made.At(crash_at, crash)]
        trainer, worker, _ = made.async_trainer(
            tiny, tmp_path, trl_redis, client_id=CLIENT, max_steps=10, max_staleness=2, save_strategy="steps",
            save_steps=2, callbacks=callbacks,
        )  # fmt: skip
        trained.kept(worker)
        try:
            trainer.train(resume_from_checkpoint=saving.get_last_checkpoint(tmp_path))
        except Crash:
            pass
        saved = saving.get_last_checkpoint(tmp_path)
        assert saved is not None
        upto = int(saved.rpartition("-")[2])
        # what was trained after the checkpoint is undone with the weights
        history |= {step: keys for step, keys in trained.steps.items() if step <= upto}
        books = worker.books
        asked[worker._run] += 1
    assert books is not None
    books.check()
    assert list(asked.values()) == [4], "one run, four times"
    assert list(attempts) == [0], "what was there is not generated again"
    assert sorted(history) == list(range(1, 11))
    mine = Counter(key for keys in history.values() for key in keys)
    assert max(mine.values()) == 1, "trained twice"
    assert books.trained == len(mine) == 10 * made.BATCH
    assert books.accepted == books.trained + books.dropped.total() + books.in_flight
    for number in range(books.numbers):  # nothing is skipped: each sample has a fate, and the two accounts agree
        for sample in range(4):
            step = next((step for step, keys in history.items() if (number, sample) in keys), None)
            fate = books.fate(number, sample)
            assert (fate == f"trained at step {step}") == (step is not None), (number, sample, fate)
    with redis.Redis.from_url(trl_redis) as db:
        left = db.xlen(Keys("default").reply(CLIENT))
    assert left <= sum(prompt.n for prompt in books.prompts.values())  # a prompt's samples leave together


def test_a_trainer_that_begins_anew_wants_nothing_of_its_predecessor(
    tiny: Path, trl_redis: str, tmp_path: Path
) -> None:
    for place in ("first", "second"):
        account = made.Account()
        trainer, worker, weights = made.async_trainer(tiny, tmp_path / place, trl_redis, client_id="anew", max_steps=2)
        account.watch(weights, worker)
        trainer.train()
        assert worker.books.trained == 2 * made.BATCH
        oldest = min(version for it in account.samples for version in it.versions if version >= 0)  # type: ignore[union-attr]
        assert oldest >= weights.first_version
