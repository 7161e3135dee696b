"""The report of a replay: its figures, its bounds, and a page that no text can break."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, RolloutResult, Segment
from rolloutmq.ops.replay import Recorded, Verdict, compared, report_of, unverified
from rolloutmq.ops.replay import report as module

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202egnp.exe\x07\x9b31m\ud800" + " " * 500_000


def asked(index: int) -> GenerateJob:
    return GenerateJob(id=f"{index:032x}", token_ids=[5, 6], n=1, reply_to="me", group_id="g")


def sample(index: int, **more: object) -> RolloutResult:
    told = {"token_ids": [1, 2, 3, 4], "logprobs": [-0.5, -1.0, -1.5, -2.0], "worker_id": f"w{index % 2}"}
    return result(asked(index), 0, **told | {"segments": [Segment(3, 2), Segment(4, 2)]} | more)


def replayed(index: int, gap: float = 0.0, place: int | None = None, **more: object) -> Verdict:
    """A sample whose log-probabilities are off by `gap`, and whose token at `place` is another one."""
    one = Recorded(sample(index), asked(index), 1.7e9, "me", more)
    before = one.result.logprobs
    assert before is not None
    token_ids = one.result.token_ids.copy()
    if place is not None:
        token_ids[place] = 99
    return compared(one, token_ids, before + np.float32(gap))


def test_a_report_adds_up() -> None:
    verdicts = [
        replayed(0), replayed(1, gap=0.01, reward=-1.0), replayed(2, place=3),
        unverified(Recorded(sample(3), None, 1.0), "no snapshot of version 3"),
    ]  # fmt: skip
    told = report_of(verdicts, {"command": "c"}, journal="out/a b", text_of=str)
    assert told["states"] == {"same": 1, "differs": 2, "unverified": 1}
    assert [row["name"] for row in told["listed"]] == [f"{index:032x}.0" for index in (2, 1, 3, 0)], "the worst first"
    old, new = told["versions"]
    assert (old["version"], old["first_differences"], new["first_differences"], new["other_tokens"]) == (3, 1, 1, 1)
    assert (old["tokens"], old["compared_logprobs"]) == (8, 6)
    assert {row["worker"]: row["differs"] for row in told["workers"]} == {"w0": 1, "w1": 1}
    histogram = told["histogram"]
    assert (sum(histogram["tokens"]), histogram["exactly_equal"], histogram["unknown"]) == (4, 8, 4)
    assert [one["tokens"] for one in told["positions"]] == [3, 3, 3, 3]
    worst = told["listed"][0]
    assert (worst["first"], worst["version"], worst["detail"]["replayed"]) == (3, 4, {3: 99})
    assert worst["look"] == f"rolloutmq job {2:032x} --journal 'out/a b'"
    assert told["listed"][1]["notes"] == {"reward": -1.0}
    assert told["texts"][99] == "99"
    assert json.loads(json.dumps(told, allow_nan=False))["reasons"] == [
        {"reason": "no snapshot of version 3", "samples": 1}
    ]


def test_both_sides_engines_stand_side_by_side_and_unread_samples_count() -> None:
    one = Recorded(sample(0, fingerprint={"device": "cpu"}), None, 1.0)
    verdicts = [replace(unverified(one, "why"), engine={"device": "cuda"})] * 2
    told = report_of(verdicts, {}, unread=["redacted"])
    assert told["engines"]["recorded"] == [{"samples": 2, "fingerprint": {"device": "cpu"}}]
    assert told["engines"]["replayed"] == [{"samples": 2, "fingerprint": {"device": "cuda"}}]
    assert (told["samples"], told["states"]["unverified"], told["left_out"]["of_the_list"]) == (3, 3, 0)


def test_a_report_is_bounded_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SHOWN", 2), ("LISTED", 3), ("SHOWN_TOKENS", 2), ("SHOWN_PROMPT", 1)):
        monkeypatch.setattr(module, name, value)
    told = report_of([replayed(index, gap=index / 100) for index in range(5)], {})
    assert [row["name"][:32].lstrip("0") for row in told["listed"]] == ["4", "3", "2"]
    assert told["left_out"] == {"of_the_list": 2, "token_by_token": 3}
    detail = told["listed"][0]["detail"]
    assert (detail["ids"], detail["left_out"], detail["prompt"], detail["prompt_left_out"]) == ([1, 2], 2, [6], 1)


def test_tokens_around_the_first_difference_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOWN_TOKENS", 2)
    detail = report_of([replayed(0, place=3)], {})["listed"][0]["detail"]
    assert (detail["start"], detail["ids"], detail["replayed"]) == (2, [3, 4], {1: 99})


def test_notes_for_each_token_masks_entropy_and_infinite_gaps() -> None:
    top = np.log(np.array([[0.5, 0.5], [1.0, 1e-9], [0.25, 0.25], [0.9, 0.05]], np.float32))
    one = Recorded(
        sample(0, token_arrays={"top_logprobs": top}),
        None,
        1.0,
        notes={"mask": [1, 1, 0, 0], "a": np.ones(4), "why": "x"},
    )
    logprobs = np.array([-0.5, -np.inf, -1.5, np.nan], np.float32)
    told = report_of([compared(one, one.result.token_ids, logprobs)], {})
    row = told["listed"][0]
    assert row["detail"]["of_each_token"] == {"mask": [1.0, 1.0, 0.0, 0.0], "a": [1.0] * 4}
    assert row["notes"] == {"why": "x"}
    assert row["detail"]["gaps"] == [0.0, -module.INFINITE, 0.0, None]
    assert row["detail"]["entropy"] == pytest.approx([0.693, 0.0, 1.040, 0.394], abs=1e-3), (
        "what is not among the top counts as one token"
    )


def hostile(text_of: Callable[[int], str] | None = None) -> dict[str, Any]:
    more = {"group_id": HOSTILE[:100], "worker_id": HOSTILE, "fingerprint": {"engine": HOSTILE}, "job_id": HOSTILE}
    one = Recorded(sample(0, metadata={"m": HOSTILE}, **more), None, 1e300, HOSTILE, {HOSTILE: HOSTILE, "deep": [[{}]]})
    verdict = replace(unverified(one, HOSTILE), engine={"engine": HOSTILE})
    return report_of([verdict], {"command": HOSTILE}, journal=HOSTILE, unread=[HOSTILE], text_of=text_of)


def test_texts_in_it_are_bounded() -> None:
    told = json.dumps(hostile(lambda token: HOSTILE))
    assert len(told) < 100_000, "texts are cut"
    assert "alert(1)" in told
