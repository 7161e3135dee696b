"""Recorded samples through a loss function of the user's."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import pytest
from support.specimens.messages import result
from typer.testing import CliRunner

from rolloutmq.messages import GenerateJob, InvalidField
from rolloutmq.messages.journal import Journal
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.journal import plain
from rolloutmq.ops.replay import Recorded
from rolloutmq.ops.replay.checks import losses_of

LOSSES = """
import torch

def per_token(batch, notes):
    return -notes["advantage"] * batch.logprobs * batch.mask

def scalar(batch, notes):
    return per_token(batch, notes).sum()

def reward(batch, notes):
    return float(batch.rewards[0])

def fails(batch, notes):
    return 1 / notes["advantage"]

def exits(batch, notes):
    raise SystemExit(0)

def odd(batch, notes):
    return [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]

def text(batch, notes):
    return "much"
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ourlosses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "ourlosses", raising=False)


def sample(letter: str, advantage: float, **more: Any) -> Recorded:
    job = GenerateJob(id=letter * 32, token_ids=[5, 6], n=1, reply_to="me", group_id="g")
    fields: dict[str, Any] = {
        "token_ids": [7, 8, 9], "logprobs": [-0.5, -4.0, -1.5], "segments": [(1, 1), (2, 2)], "prompt_ids": [5, 6],
    }  # fmt: skip
    return Recorded(result(job, 0, **(fields | more)), job, 1.0, notes={"advantage": advantage, "reward": 0.25})


def test_samples_and_tokens_are_sorted_by_what_they_add() -> None:
    found = losses_of([sample("a", 0.5), sample("b", -3.0), sample("c", 0.0)], "ourlosses:per_token")
    assert [one.sample[0] for one in found.samples] == ["b", "a", "c"]
    assert [one.loss for one in found.samples] == [-18.0, 3.0, 0.0]
    assert [round(one.share, 4) for one in found.samples] == [0.8571, 0.1429, 0.0]
    assert list(map(astuple, found.samples[0].tokens)) == [(1, 8, 2, -12.0), (2, 9, 2, -4.5), (0, 7, 1, -1.5)]
    assert found.samples[2].tokens == []
    assert found.lines()[0] == "3 samples, total loss -15"
    whole = losses_of([sample("a", 0.5), sample("b", -3.0)], "ourlosses:scalar")
    assert [(one.loss, one.tokens) for one in whole.samples] == [(-18.0, []), (3.0, [])]
    assert losses_of([sample("a", 0.5)], "ourlosses:reward").samples[0].loss == 0.25


def test_the_prompt_of_a_job_of_ids_is_the_jobs() -> None:
    """Its worker does not send it back, so the recorded result does not have it."""
    found, whole = (
        losses_of([one], "ourlosses:per_token") for one in (sample("a", 0.5, prompt_ids=None), sample("a", 0.5))
    )
    assert found.left_out == {}
    assert found.samples[0].tokens == whole.samples[0].tokens


def test_what_is_no_number_comes_first() -> None:
    found = losses_of([sample("a", 0.5), sample("b", math.nan)], "ourlosses:per_token")
    assert [one.sample[0] for one in found.samples] == ["b", "a"]
    assert json.loads(json.dumps(plain(asdict(found)), allow_nan=False))["samples"][0]["loss"] is None


def test_samples_without_logprobs_or_prompt_are_left_out() -> None:
    without = replace(sample("b", 1.0, prompt_ids=None), job=None)
    found = losses_of([sample("a", 1.0, logprobs=None), without, sample("c", 1.0)], "ourlosses:per_token")
    assert found.left_out == {"no logprobs": 1, "no prompt_ids": 1}
    assert [one.sample[0] for one in found.samples] == ["c"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ourlosses:fails", "takes sample a{32}.0: ZeroDivisionError"),
        ("ourlosses:exits", r"takes sample a{32}.0: SystemExit\(0\)"),
        ("ourlosses:odd", "one for each of 5 tokens; sample a{32}.0: 7"),
        ("ourlosses:text", "returns numbers; sample a{32}.0"),
        ("ourlosses:nothing", "can be imported"),
        ("nothing:nothing", "can be imported"),
        ("ourlosses:torch", "a function, not module"),
        ("ourlosses", "MODULE:FUNCTION"),
    ],
)
def test_errors_of_the_function_name_the_sample(name: str, error: str) -> None:
    with pytest.raises(InvalidField, match=f"--by.*{error}"):
        losses_of([sample("a", 0.0)], name)


def test_a_loss_of_no_sample_is_no_success(tmp_path: Path) -> None:
    """The only one has no log-probabilities."""
    with Journal(tmp_path / "journal") as journal:
        one = sample("a", 1.0, logprobs=None)
        journal.job(one.job)
        journal.outcome(one.result, "me")
    options = ["--journal", str(tmp_path / "journal"), "--by", "ourlosses:scalar"]
    shown = CliRunner().invoke(app, ["replay", "loss", *options])
    assert (shown.exit_code, "0 samples" in shown.output) == (2, True), shown.output
