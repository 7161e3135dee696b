"""What a run is watched by, as flat figures with fixed names: for Weights & Biases, TensorBoard, or a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..messages.broker import PoolLoad
from ..messages.errors import InvalidField
from ..messages.model import PRIORITIES, WorkerStatus
from .training import REASONS

if TYPE_CHECKING:
    from ..sync.publish import PublishReport

TOTALS = ("prompts", "accepted", "trained", "in_flight", "updates", "version", "ready", "at_trainer", "unsaved_bytes")
NEEDED = {"trained", "dropped", "marks", "staleness"}
MARKS = ("marked", "waited", "asked again", "let through", "held up", "left out")
LOADS = ("open_jobs", "open_bytes", "unread_bytes", "suspects", "redelivered", "leases_lost", "dead")


def figures(
    books: Mapping[str, Any] | None = None,
    before: Mapping[str, Any] | None = None,
    *,
    load: PoolLoad | None = None,
    workers: Iterable[WorkerStatus] = (),
    sync: PublishReport | None = None,
) -> dict[str, float]:
    """Figures of a run as they are now, each under `rollout/…`. What is not given or not known yet is left out.

    books: the report of a feed or of books: `rollout/accepted`, `trained`, `in_flight`, `dropped/stale` and the other
        reasons, `marks/…`, `updates`, `version`. before: the report of the time before. `rollout/staleness/mean` and
        `max` (updates), `reward/mean`, `length/mean` (tokens) and `dropped_share` are of what ended since then.
    load, workers: of the client. `rollout/queue/high`, `normal` and `low` (jobs that wait), `queue/open_jobs`,
        `queue/redelivered` and others; `workers/count`, `running`, `tokens_per_s`, `behind` (most versions that one has
        yet to get).
    sync: a report of the publisher: `rollout/sync/seconds`, `bytes`, `workers`, `failures`, `version`.
    Raises InvalidField for what is no report of books.
    """
    for name, report in (("books", books), ("before", before)):
        if report is not None and not (isinstance(report, Mapping) and report.keys() >= NEEDED):
            raise InvalidField(name, report, "the report of a feed or of books: feed.report()")
    found: dict[str, float] = {}
    if books is not None:
        found |= {name: books[name] for name in TOTALS if name in books}
        found |= {f"dropped/{why}": books["dropped"].get(why, 0) for why in REASONS}
        found |= {f"marks/{name.replace(' ', '_')}": books["marks"].get(name, 0) for name in MARKS}
        found |= _since(books, before or {})
    if load is not None:
        found |= {f"queue/{name}": count for name, count in zip(PRIORITIES, load.queued, strict=True)}
        found |= {f"queue/{name}": getattr(load, name) for name in LOADS}
    if known := list(workers):
        newest = max(worker.version for worker in known)
        found |= {f"workers/{name}": sum(getattr(it, name) for it in known) for name in ("running", "tokens_per_s")}
        found |= {"workers/count": len(known), "workers/behind": max(worker.behind(newest) for worker in known)}
    if sync is not None:
        found |= {"sync/version": sync.version, "sync/seconds": sync.seconds, "sync/bytes": sync.nbytes}
        found |= {"sync/workers": len(sync.workers), "sync/failures": len(sync.failures)}
    return {f"rollout/{name}": float(value) for name, value in found.items()}


def log_figures(to: Any, told: Mapping[str, float], step: int) -> None:
    """Give figures to a run of Weights & Biases (or whatever has its `log`), or to a SummaryWriter (`add_scalar`).

    Raises InvalidField for anything else.
    """
    if callable(add := getattr(to, "add_scalar", None)):
        for name, value in told.items():
            add(name, value, step)
    elif callable(log := getattr(to, "log", None)):
        log(dict(told), step=step)
    else:
        raise InvalidField("to", to, "a run of wandb, with log(), or a SummaryWriter, with add_scalar()")


def _since(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """What is about the samples that ended between two reports."""
    found: dict[str, float] = {}
    ages = +_less(now["staleness"], before.get("staleness", {}))
    if ages:
        found["staleness/mean"] = sum(age * count for age, count in ages.items()) / ages.total()
        found["staleness/max"] = max(ages)
    for name in ("reward", "length"):
        (count, total), (count_before, total_before) = _sum(now, name), _sum(before, name)
        if count > count_before:
            found[f"{name}/mean"] = (total - total_before) / (count - count_before)
    dropped = (+_less(now["dropped"], before.get("dropped", {}))).total()
    if ended := dropped + max(0, now["trained"] - before.get("trained", 0)):
        found["dropped_share"] = dropped / ended
    return found


def _less(now: Mapping[Any, int], before: Mapping[Any, int]) -> Counter[Any]:
    return Counter({key: count - before.get(key, 0) for key, count in now.items()})


def _sum(report: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Count and sum of the rewards or lengths of what was trained."""
    spread = report.get(f"{name}s", {}).get("trained", {})
    return spread.get("count", 0), spread.get("count", 0) * (spread.get("mean") or 0.0)
