"""The result of a run: `summary.json`, and the reasons why it may not count as a success."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...sync.publish import PublishReport
from .tally import Tally
from .trainer import Step

ENDS = 10
MAX_GAP = 0.02


def summarise(
    steps: Sequence[Step],
    tally: Tally,
    reports: Sequence[PublishReport],
    warmup: dict[str, float],
    *,
    seconds_setup: float,
    seconds_training: float,
    worker_killed: bool,
    worker_joined_late: bool,
) -> dict[str, Any]:
    """The content of summary.json; all of it was measured. Rewards are those of samples that the pool generated."""
    first, last = [step.reward for step in steps[:ENDS]], [step.reward for step in steps[-ENDS:]]
    gap_tokens = sum(step.gap_tokens for step in steps)
    committed = [report for report in reports if report.state == "committed"]
    return {
        "task": "sort four digits",
        "reward_first": round(_mean(first), 4),
        "reward_last": round(_mean(last), 4),
        "steps": len(steps),
        "versions_published": len(committed),
        "versions_superseded": sum(report.state == "superseded" for report in reports),
        "versions_failed": sum(report.state == "failed" for report in reports),
        "publish_seconds_mean": round(_mean([report.seconds for report in committed]), 4),
        "jobs": tally.jobs,
        "samples": tally.samples,
        "tokens": tally.tokens,
        "lost": tally.lost,
        "duplicates": tally.duplicates,
        "redone_samples": tally.redone,
        "mixed_version_samples": tally.mixed_version_samples,
        "segments_that_do_not_add_up": tally.bad_segments,
        "staleness_mean": round(tally.staleness_mean, 4),
        "staleness_max": tally.staleness_max,
        "logprob_gap_mean": sum(step.gap_sum for step in steps) / gap_tokens if gap_tokens else None,
        "logprob_gap_tokens": gap_tokens,
        "worker_killed": worker_killed,
        "worker_joined_late": worker_joined_late,
        "samples_by_worker": dict(Counter(tally.by_worker).most_common()),
        "seconds_setup": round(seconds_setup, 2),
        "seconds_training": round(seconds_training, 2),
        "seconds_trainer_waited": round(sum(step.waited for step in steps), 2),
        "tokens_per_second": round(tally.tokens / seconds_training, 1) if seconds_training else 0.0,
        "warmup": {
            "what": "supervised steps on worked examples, in place of a base model; everything after them is RL",
            **warmup,
        },
        "failed_jobs": tally.failures[:20],
    }


def objections(summary: dict[str, Any]) -> list[str]:
    """The reasons why this run failed; empty for a good one. They do not judge how far the reward got."""
    lost, twice, odd = (summary[name] for name in ("lost", "duplicates", "segments_that_do_not_add_up"))
    gap = summary["logprob_gap_mean"]
    far = f"log-probabilities of engine and trainer differ by {gap} on average; at most {MAX_GAP} is right"
    judged = (
        (lost, f"{lost} samples were submitted and never came back: {summary['failed_jobs'][:3]}"),
        (twice, f"{twice} samples were delivered more than once"),
        (odd, f"segments of {odd} samples do not add up to their tokens"),
        (gap is None or gap > MAX_GAP, far),
        (not summary["versions_published"], "no weights version was committed"),
        (not summary["worker_killed"], "the killed worker is still alive or still on the pool's list"),
        (not summary["worker_joined_late"], "the worker that was started late delivered nothing"),
    )
    return [objection for wrong, objection in judged if wrong]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
