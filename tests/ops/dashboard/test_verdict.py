"""Alarms and the verdict, from what is known of a pool: each cause, each state, and the paragraphs that explain it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.ops.dashboard.alarms import KINDS, Kind
from rolloutmq.ops.dashboard.causes import GROUPS, OTHERS, grouped, normalised
from rolloutmq.ops.dashboard.verdict import Died, Moment, Refusal, Rewards, alarms_of, reward_fell, verdict_of
from rolloutmq.ops.journal import Failed
from rolloutmq.ops.scale import STATES
from rolloutmq.producer.diagnosis import CAUSES, NO_FAULT, Cause, Reason

DOCS = Path(__file__).resolve().parents[3] / "docs"
FAILED = [Failed(1.0, "j", "it broke")]
MAKES: dict[Kind, dict[str, Any]] = {
    "workers-die": {"deaths": [Died(1.0, "w", "h", "silent", 3.0)]},
    "engines-die": {"restarts": [(1.0, "w")]},
    "stalled": {"stalls": [(1.0, "w")]},
    "sync-failed": {"refusals": [Refusal(1.0, "w", 3, "load: NaN")]},
    "snapshot-broken": {"refusals": [Refusal(1.0, "w", 3, "receive of the snapshot: digest")]},
    "stale-samples": {"stale": {0: 8, 9: 2}},
    "reward-fell": {"rewards": {n: Rewards(20, 20.0 if n < 3 else -20.0, 20.0) for n in range(6)}},
    "jobs-fail": {"failures": grouped(FAILED)},
    "never-claimed": {"unclaimed": [("seed", 2, 1.0)]},
    "near-cap": {"full": {"jobs and results": 0.95}},
    "redis-memory": {"full": {"Redis": 0.95}},
    "journal-lost": {"lost_entries": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_alarm_has_its_paragraph_in_the_documentation(kind: Kind) -> None:
    (alarm,) = alarms_of(Moment(10.0, **MAKES[kind]))
    assert alarm.id == kind
    assert f"| `{kind}` | {alarm.text} |" in (DOCS / "dashboard.md").read_text()
    page, anchor = alarm.doc.removeprefix("docs/").split("#")
    headings = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", it).lower().replace(" ", "-") for it in headings}
    assert not alarms_of(Moment(10.0))


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_of_the_diagnosis_is_an_alarm_unless_it_is_no_fault(cause: Cause) -> None:
    reason = Reason(cause, "what is there", "what to do", since=4.0)
    moment = Moment(10.0, reasons=[reason], scale=("balanced", "told"))
    alarms = alarms_of(moment)
    assert [(one.id, one.text) for one in alarms] == [] if cause in NO_FAULT else [(f"why-{cause}", "what to do")]
    verdict = verdict_of(moment, alarms)
    if cause not in NO_FAULT:
        assert (verdict["title"], verdict["since"], verdict["todo"]) == ("What is there", 4.0, ["what to do"])
        assert verdict["state"] in {"standing", "broken"}
    else:
        assert verdict["state"] == "healthy"


@pytest.mark.parametrize("state", STATES)
def test_each_state_of_the_scaler_is_a_verdict(state: str) -> None:
    verdict = verdict_of(Moment(10.0, scale=(state, "with figures")), [])
    assert verdict["why"] == ["with figures"]
    again = verdict_of(Moment(20.0, scale=(state, "")), [], verdict)
    assert (again["state"], again["since"]) == (verdict["state"], 10.0), "it lasts since then"


def test_a_silent_redis_comes_before_everything() -> None:
    moment = Moment(10.0, silent_s=4.0, reasons=[Reason("paused", "paused", "resume")], scale=("idle", ""))
    verdict = verdict_of(moment, alarms_of(moment))
    assert (verdict["state"], verdict["since"]) == ("broken", 6.0)


def test_what_others_do_meanwhile_keeps_a_waiting_job_an_alarm_alone() -> None:
    moment = Moment(10.0, reasons=[Reason("needs", "seed", "start one")], scale=("balanced", ""), running=3)
    alarms = alarms_of(moment)
    assert [one.severity for one in alarms] == ["error"]
    assert verdict_of(moment, alarms)["state"] == "healthy"


DYING = [Died(float(n), f"w{n}", "h", "exit status 139", 3.0) for n in range(1, 5)]


@pytest.mark.parametrize("scale", ["starved", "saturated", "unclaimed"])
def test_workers_that_keep_dying_come_before_what_their_lack_brings(scale: str) -> None:
    moment = Moment(10.0, scale=(scale, ""), deaths=DYING, scale_since=2.0)
    verdict = verdict_of(moment, alarms_of(moment))
    told = "Workers die again and again: 4 on h; the last was w4, exit status 139"
    assert (verdict["state"], verdict["title"], verdict["since"]) == ("broken", told, 1.0)
    few = Moment(10.0, scale=(scale, ""), deaths=DYING[:2], scale_since=2.0)
    assert verdict_of(few, alarms_of(few))["state"] in {"starved", "saturated", "standing"}
    well = Moment(10.0, scale=("balanced", ""), deaths=DYING)
    assert verdict_of(well, alarms_of(well))["state"] == "healthy"
    none_left = Reason("no-worker", "the pool has no worker", "start one", since=5.0)
    assert verdict_of(Moment(10.0, reasons=[none_left], deaths=DYING), [])["title"] == told


def by_version(*means: float, n: int = 20, spread: float = 0.1) -> dict[int, Rewards]:
    return {v: Rewards(n, n * mean, n * (mean**2 + spread**2)) for v, mean in enumerate(means)}


@pytest.mark.parametrize(
    ("means", "version"),
    [
        ((0.5, 0.5, 0.5, 0.5), None),
        ((0.1, 0.2, 0.4, 0.8), None),
        ((0.8, 0.8, 0.8, -0.8, -0.8, -0.8), 3),
        ((0.8, 0.8, 0.8, 0.8, -0.8), None),
        ((0.8, 0.8, 0.79, 0.8, 0.79, 0.8), None),
        ((0.2, 0.4, 0.6, 0.6, 0.6, 0.3, 0.3, 0.3), 5),
    ],
)
def test_a_reward_that_fell_names_the_version(means: tuple[float, ...], version: int | None) -> None:
    found = reward_fell(by_version(*means))
    assert (found and found[0]) == version
    assert reward_fell(by_version(*means, n=2)) is None, "of so few nobody knows"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("token 17 of /models/a-3/x.bin: 0x7f3a", "token <n> of <path>: <id>"),
        ("job 0192f0c1a2b34c5d8e9fa0b1c2d3e4f5 died", "job <id> died"),
        ("worker gpu01-4711-5aa74f54 at s3://bucket/k v12", "worker gpu<n>-<n>-<id> at <path> v<n>"),
        ("a\x1b[31mb\n\tc   d", "a\ufffd[<n>mb c d"),
        ("x" * 5000, "x" * 240),
        ("", ""),
    ],
)
def test_numbers_ids_and_paths_are_no_causes(text: str, cause: str) -> None:
    assert normalised(text) == cause


def test_groups_are_bounded() -> None:
    word = "abcdefghijklmnopqrstuvwxyz"
    groups = grouped(Failed(float(n), f"{n}", word[: 1 + n // 26] + "." + word[n % 26 :]) for n in range(300))
    assert len(groups) == GROUPS + 1
    assert sum(one.count for one in groups) == 300
    assert groups[0].cause == OTHERS
    assert all(len(one.jobs) <= 5 for one in groups)
