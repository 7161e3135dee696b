"""A job's life: when it was accepted, what came of each sample and under which weights, and what the trainer noted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...messages.journal import Entry
from ...messages.model import GenerateJob, RolloutResult
from .lines import as_data, clock, content_of, noted, prompt_of


@dataclass(slots=True)
class Life:
    """The entries of one job, in order. accepted: None if the journal began later. notes: of each sample, or -1."""

    job_id: str
    accepted: Entry | None = None
    results: dict[int, Entry] = field(default_factory=dict)
    failure: Entry | None = None
    notes: dict[int, list[Entry]] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "job_id": self.job_id,
            "accepted": None if self.accepted is None else as_data(self.accepted),
            "results": [as_data(entry) for _, entry in sorted(self.results.items())],
            "failure": None if self.failure is None else as_data(self.failure),
            "notes": [as_data(entry) for _, entries in sorted(self.notes.items()) for entry in entries],
        }

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"job {self.job_id}"]
        if self.accepted is None:
            lines.append("  accepted before the journal began")
        else:
            lines.append(f"  {clock(self.accepted.at)}  accepted from {self.accepted.client_id}")
            lines += _of_job(content_of(self.accepted))
        for sample, entry in sorted(self.results.items()):
            lines += _of_result(entry)
            lines += [_of_note(note) for note in self.notes.get(sample, ())]
        if self.failure is not None:
            told = self.failure.data
            lines.append(f"  {clock(self.failure.at)}  {told.get('outcome')}: {told.get('cause')}")
            lines += [f"      {told[name]}" for name in ("error", "host") if told.get(name)]
        without = [note for sample, notes in self.notes.items() if sample not in self.results for note in notes]
        return lines + [_of_note(note) for note in without]


def life_of(job_id: str, entries: Iterable[Entry]) -> Life | None:
    """What the entries say of a job; None if they say nothing. A result that arrived again counts once."""
    life, found = Life(job_id), False
    for entry in entries:
        if entry.job_id != job_id:
            continue
        found = True
        if entry.event == "job":
            life.accepted = life.accepted or entry
        elif entry.event == "result":
            life.results.setdefault(entry.sample, entry)
        elif entry.event == "failure":
            life.failure = entry
        elif entry.event == "note":
            life.notes.setdefault(entry.sample, []).append(entry)
    return life if found else None


def _of_job(message: Any) -> list[str]:
    if not isinstance(message, GenerateJob):
        return []
    asked = message.sampling.model_dump(exclude_unset=True, exclude_none=True)
    sampling = ", ".join(f"{name}={value}" for name, value in asked.items())
    return [f"      prompt of {prompt_of(message)}; n={message.n}; {sampling or 'default sampling'}"]


def _of_result(entry: Entry) -> list[str]:
    result = content_of(entry)
    if not isinstance(result, RolloutResult):
        return [f"  {clock(entry.at)}  sample {entry.sample}: a result without its content"]
    took = result.timings
    return [
        f"  {clock(entry.at)}  sample {result.sample}: {len(result.token_ids)} tokens, {result.finish_reason}",
        f"      by {result.worker_id}, attempt {result.attempt}; {took.queued:.2f} s queued, "
        f"{took.generating:.2f} s generating, {took.waiting:.2f} s waiting on the worker",
        *(f"      tokens {span}: version {version}" for span, version in _spans(result)),
    ]


def _spans(result: RolloutResult) -> list[tuple[str, int]]:
    spans, place = [], 0
    for version, tokens in result.segments:
        spans.append((f"{place} to {place + tokens - 1}", version))
        place += tokens
    return spans


def _of_note(entry: Entry) -> str:
    return f"      {clock(entry.at)}  {noted(entry)}"
