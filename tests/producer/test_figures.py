"""The figures of a run, and where they go: Weights & Biases and TensorBoard, each as it is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.event_files import scalars
from support.specimens.messages import tokens
from tensorboardX import SummaryWriter

from rolloutmq import GroupRules, InvalidField, PublishReport, RolloutClient, Staleness, figures, log_figures
from rolloutmq.producer.training import REASONS, Books, Measured

TOTALS = {"prompts", "accepted", "trained", "in_flight", "updates", "version"}


def books() -> Books:
    """Two prompts of four: three samples trained at ages 0, 0 and 1, one dropped, four in flight."""
    made = Books()
    made.accept(4)
    made.accept(4)
    made.train(0, [0, 1], 1, {0: Measured(10, 1.0, 0), 1: Measured(20, 0.0, 0)})
    made.advance(1)
    made.train(0, [2], 2, {2: Measured(30, 0.5, 1)})
    made.drop(0, [3], "stale", {3: Measured(5, 0.0, 2)})
    return made


def test_what_books_say() -> None:
    told = figures(books().report())
    assert (told["rollout/accepted"], told["rollout/trained"], told["rollout/in_flight"]) == (8, 3, 4)
    assert (told["rollout/updates"], told["rollout/version"]) == (1, 1)
    assert (told["rollout/dropped/stale"], told["rollout/dropped/failed"]) == (1, 0)
    assert (told["rollout/staleness/mean"], told["rollout/staleness/max"]) == (pytest.approx(1 / 3), 1)
    assert (told["rollout/reward/mean"], told["rollout/length/mean"]) == (0.5, 20)
    assert told["rollout/dropped_share"] == 0.25
    assert all(type(value) is float for value in told.values())


def test_names_are_there_before_anything_happens() -> None:
    """A chart begins at 0, and is not made amid the run."""
    names = TOTALS | {f"dropped/{why}" for why in REASONS}
    told = figures(Books().report())
    assert {f"rollout/{name}" for name in names} <= told.keys()
    assert {name for name, value in told.items() if name.startswith("rollout/marks/") and value == 0} == {
        f"rollout/marks/{name}" for name in ("marked", "waited", "asked_again", "let_through", "held_up", "left_out")
    }
    assert not any("mean" in name or "share" in name for name in told), "of nothing there is no mean"
    assert figures() == {}


def test_means_are_of_what_ended_since_the_last_time() -> None:
    made = books()
    before = made.report()
    assert "rollout/staleness/mean" not in figures(made.report(), before)
    made.train(1, [0, 1], 3, {0: Measured(100, -1.0, 1), 1: Measured(200, -2.0, 3)})
    made.drop(1, [2, 3], "failed")
    told = figures(made.report(), before)
    assert (told["rollout/staleness/mean"], told["rollout/staleness/max"]) == (2, 3)
    assert (told["rollout/reward/mean"], told["rollout/length/mean"]) == (pytest.approx(-1.5), pytest.approx(150))
    assert told["rollout/dropped_share"] == 0.5
    assert told["rollout/trained"] == 5, "totals stay totals"


def test_books_that_went_back_to_a_checkpoint() -> None:
    told = figures(Books().report(), books().report())
    assert not any("mean" in name or "share" in name for name in told)


async def test_queue_and_workers_of_a_pool(client: RolloutClient, serving: None) -> None:
    feed = client.feed(Staleness(eta=1, batch_size=4), GroupRules(score=lambda results: [1.0] * len(results)))
    async for groups in feed.batches([tokens(n=2) for _ in range(4)], timeout=20):
        feed.train(groups)
        feed.advance(feed.books.version + 1)
    report = PublishReport(7, "committed", ("w1", "w2"), {"w3": "it left"}, nbytes=1000, seconds=0.5)
    told = figures(feed.report(), load=await client.load(), workers=await client.workers(), sync=report)
    assert (told["rollout/trained"], told["rollout/ready"], told["rollout/reward/mean"]) == (8, 0, 1)
    assert (told["rollout/queue/normal"], told["rollout/queue/open_jobs"], told["rollout/queue/dead"]) == (0, 0, 0)
    assert (told["rollout/workers/count"], told["rollout/workers/behind"]) == (1, 0)
    assert (told["rollout/sync/version"], told["rollout/sync/seconds"], told["rollout/sync/bytes"]) == (7, 0.5, 1000)
    assert (told["rollout/sync/workers"], told["rollout/sync/failures"]) == (2, 1)


@pytest.mark.parametrize("wrong", [books(), [], {"trained": 1}])
def test_what_is_no_report_is_refused(wrong: Any) -> None:
    for given in ((wrong,), (Books().report(), wrong)):
        with pytest.raises(InvalidField, match=r"feed\.report\(\)"):
            figures(*given)


# --- where they go ----------------------------------------------------------------------------------------------------


def test_tensorboard_shows_them(tmp_path: Path) -> None:
    told = figures(books().report())
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            log_figures(writer, told, step)
    assert scalars(tmp_path) == {name: [(1, pytest.approx(it)), (2, pytest.approx(it))] for name, it in told.items()}


def test_weights_and_biases_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    told = figures(books().report())
    with wandb.init(project="pool", dir=tmp_path, settings={"console": "off"}) as run:
        for step in (1, 2):
            log_figures(run, told, step)
        assert {name: run.summary[name] for name in told} == told
        assert run.step == 2


def test_a_run_gets_one_call_for_each_step() -> None:
    """As wandb's: a second call for the same step costs more, and an older step is refused there."""
    calls: list[tuple[str, int]] = []
    run = SimpleNamespace(log=lambda data, step=None, commit=None: calls.append((json.dumps(data), step)))
    told = figures(books().report())
    log_figures(run, told, 7)
    assert calls == [(json.dumps(told), 7)]


@pytest.mark.parametrize("to", [None, "run", {"log": print}])
def test_what_cannot_be_logged_to_is_refused(to: Any) -> None:
    with pytest.raises(InvalidField, match=r"to=.*SummaryWriter"):
        log_figures(to, {}, 1)
