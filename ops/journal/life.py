"""A job's life: when it was accepted, what became of its samples under which weights, and what was noted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...messages.journal import Entry
from ...messages.model import GenerateJob, RolloutResult
from .lines import as_data, clock, content, noted, prompt_of

SHOWN_SAMPLES = 8
SHOWN_EVENTS = 24
SHOWN_SPANS = 12
SHOWN_NOTES = 8
"""A life is one screen: so many of each are shown, and the number of the others."""


@dataclass(slots=True)
class Life:
    """The entries of one job, in order. accepted: None if the journal began later. notes: of each sample, or -1.

    consumed: of each sample, or -1 for the failure, when its client had it for good. events: what else happened, such
    as claims, saved pieces and deaths of workers.
    """

    job_id: str
    accepted: Entry | None = None
    results: dict[int, Entry] = field(default_factory=dict)
    failure: Entry | None = None
    notes: dict[int, list[Entry]] = field(default_factory=dict)
    consumed: dict[int, Entry] = field(default_factory=dict)
    events: list[Entry] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "job_id": self.job_id,
            "accepted": None if self.accepted is None else as_data(self.accepted),
            "results": [as_data(entry) for _, entry in sorted(self.results.items())],
            "failure": None if self.failure is None else as_data(self.failure),
            "notes": [as_data(entry) for _, entries in sorted(self.notes.items()) for entry in entries],
            "consumed": [as_data(entry) for _, entry in sorted(self.consumed.items())],
            "events": [as_data(entry) for entry in self.events],
        }

    def sample(self, number: int) -> RolloutResult | None:
        """A sample's result; None if the journal does not have it, or not its content."""
        message = content(self.results[number])[0] if number in self.results else None
        return message if isinstance(message, RolloutResult) else None

    def lines(self, only: Collection[int] = ()) -> list[str]:
        """For people. only: the samples to show; those of the first ones that fit on a screen if there are none."""
        chosen = sorted(self.results.keys() & {*only} if only else self.results)
        shown = chosen if only else chosen[:SHOWN_SAMPLES]
        events, half = self._told_events(), SHOWN_EVENTS // 2  # how it began, and how it ended
        told: list[tuple[float, list[str]]] = [
            *((self.results[number].at, self._of_sample(number)) for number in shown),
            *((entry.at, [_of_event(entry)]) for entry in events[:half]),
            *((entry.at, [_of_event(entry)]) for entry in events[max(half, len(events) - half) :]),
        ]
        if self.accepted is not None:
            told.append((self.accepted.at, _of_job(self.accepted)))
        if self.failure is not None:
            told.append((self.failure.at, _of_failure(self.failure)))
        lines = [f"job {self.job_id}", f"  {self._summary()}"]
        lines += ["  accepted before the journal began"] if self.accepted is None else []
        lines += [line for _, some in sorted(told, key=lambda one: one[0]) for line in some]
        if len(events) > SHOWN_EVENTS:
            lines.append(f"  {len(events) - SHOWN_EVENTS:,} more events are left out; --json has all")
        if hidden := len(self.results) - len(shown):
            lines.append(f"  {hidden:,} more samples are left out; --sample NUMBER shows one, --json has all")
        if only and (missing := sorted({*only} - self.results.keys())):
            lines.append(f"  the journal has no result of sample {', '.join(map(str, missing))}")
        without = [note for sample, notes in self.notes.items() if sample not in self.results for note in notes]
        return lines + _of_notes(without)

    def _of_sample(self, number: int) -> list[str]:
        taken = self.consumed.get(number)
        lines = _of_result(self.results[number])
        lines += [f"      {clock(taken.at)}  consumed by {taken.client_id}"] if taken is not None else []
        return lines + _of_notes(self.notes.get(number, []))

    def _told_events(self) -> list[Entry]:
        """Without what other lines say: that a sample was published whose result is here, and pieces before the last
        one that an attempt saved of a sample."""
        told: list[Entry] = []
        saved: dict[tuple[int, int], int] = {}
        for entry in self.events:
            what, place = f"{entry.event} {_text(entry, 'what')}", (entry.sample, entry.attempt)
            if what == "attempt published" and entry.sample in self.results:
                continue
            if what == "attempt saved":
                if place in saved:
                    told[saved[place]] = entry
                    continue
                saved[place] = len(told)
            told.append(entry)
        return told

    def _summary(self) -> str:
        tokens, workers, versions, expected = 0, set[str](), set[int](), 0
        for entry in self.results.values():
            versions.update(entry.versions)
            if isinstance(message := content(entry)[0], RolloutResult):
                tokens, expected = tokens + len(message.token_ids), message.n
                workers.add(message.worker_id)
        asked = None if self.accepted is None else content(self.accepted)[0]
        expected = asked.n if isinstance(asked, GenerateJob) else expected
        parts = [f"{len(self.results):,} of {expected or 'an unknown number of'} samples", f"{tokens:,} tokens"]
        parts += [f"version{'s' if len(versions) > 1 else ''} {_few(sorted(versions))}"] if versions else []
        parts += [f"{len(workers)} workers" if len(workers) > 1 else f"by {workers.pop()}"] if workers else []
        if self.accepted is not None and self.results:
            last = max(entry.at for entry in self.results.values())
            parts.append(f"{last - self.accepted.at:.2f} s from acceptance to the last result")
        return ", ".join(parts)


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
        elif entry.event == "consumed":
            life.consumed.setdefault(entry.sample, entry)
        else:
            life.events.append(entry)
    return life if found else None


def _of_job(entry: Entry) -> list[str]:
    line = f"  {clock(entry.at)}  accepted from {entry.client_id or 'an unknown client'}"
    job, problem = content(entry)
    if not isinstance(job, GenerateJob):
        return [line, f"      {problem or f'a job of the kind {type(job).__name__}'}"]
    asked = job.sampling.model_dump(exclude_unset=True, exclude_none=True)
    sampling = ", ".join(f"{name}={str(value)[:60]}" for name, value in asked.items())
    return [line, f"      prompt of {prompt_of(job)}; n={job.n}; {sampling or 'default sampling'}"]


def _of_result(entry: Entry) -> list[str]:
    result, problem = content(entry)
    line = f"  {clock(entry.at)}  sample {entry.sample}: "
    if not isinstance(result, RolloutResult):
        return [line + (problem or f"a result of the kind {type(result).__name__}")]
    took, spans = result.timings, list(_spans(result))
    lines = [
        f"{line}{len(result.token_ids):,} tokens, {result.finish_reason}",
        f"      by {result.worker_id}, attempt {result.attempt}; {took.queued:.2f} s queued, "
        f"{took.generating:.2f} s generating, {took.waiting:.2f} s waiting on the worker",
        *(f"      {span}" for span in spans[:SHOWN_SPANS]),
    ]
    if len(spans) > SHOWN_SPANS:
        lines.append(f"      and {len(spans) - SHOWN_SPANS} more versions")
    if result.legs:
        lines.append(f"      given to an engine again at tokens {_few(result.legs)}")
    if result.in_place:
        lines.append(f"      weights switched in place at tokens {_few(result.in_place)}")
    return lines


def _of_failure(entry: Entry) -> list[str]:
    if not entry.data:
        return [f"  {clock(entry.at)}  failed; the entry was written without its content"]
    line = f"  {clock(entry.at)}  {_text(entry, 'outcome')}: {_text(entry, 'cause')[:200]}"
    return [line, *(f"      {text[:400]}" for name in ("error", "host") if (text := _text(entry, name)))]


def _of_event(entry: Entry) -> str:
    """What happened, to which sample, by whom, and whatever else the entry has."""
    what, who = _text(entry, "what"), _text(entry, "worker") or entry.client_id
    kind = f"{entry.event}: {what}" if what and entry.event != "attempt" else what or entry.event
    told = f"sample {entry.sample}: {kind}" if entry.sample >= 0 else kind
    told += f" by {who}" if who else ""
    told += f", attempt {entry.attempt}" if entry.attempt >= 0 else ""
    told += f", version {_few(entry.versions)}" if entry.versions else ""
    said = {name for name in ("what", "worker") if _text(entry, name)}
    rest = noted({name: value for name, value in entry.data.items() if name not in said and value is not None})
    return f"  {clock(entry.at)}  {told}{f'; {rest}' if rest else ''}"


def _text(entry: Entry, name: str) -> str:
    """A text in the entry's data; "" if there is none, or something else."""
    value = entry.data.get(name)
    return value if isinstance(value, str) else ""


def _of_notes(entries: list[Entry]) -> list[str]:
    lines = [f"      {clock(entry.at)}  {noted(entry.data) or 'a note without its content'}" for entry in entries]
    hidden = len(lines) - SHOWN_NOTES
    return lines if hidden <= 0 else [*lines[:SHOWN_NOTES], f"      {hidden:,} more notes are left out"]


def _spans(result: RolloutResult) -> Iterator[str]:
    place = 0
    for version, tokens in result.segments:
        yield f"tokens {place} to {place + tokens - 1}: version {version}"
        place += tokens


def _few(numbers: Collection[int]) -> str:
    """The numbers, of many the first and the last one."""
    given = list(numbers)
    return ", ".join(map(str, given)) if len(given) <= SHOWN_SPANS else f"{given[0]} … {given[-1]} ({len(given)})"
