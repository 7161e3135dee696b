"""Recorded samples: what a journal has of each, put together and chosen by ids, time and an expression."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...messages.errors import ConfigError, InvalidField
from ...messages.journal import Entry, read
from ...messages.model import GenerateJob, RolloutResult
from .lines import content

log = logging.getLogger(__name__)
FIRST_BATCH, BATCH, BATCH_BYTES = 64, 8192, 64 << 20
"""So many results, or bytes of them, are put together with their jobs and notes at a time: at first, and at most."""

Place = tuple[str, int]
Notes = dict[str, Any]


class Span(NamedTuple):
    """Tokens `start` to `end` (not included) of a sample, sampled with weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """One sample as the journal has it.

    result: with its tokens, log-probabilities and segments. job: None if the journal does not have it, or if it cannot
    be read; `problem` says why then. at: when the result arrived, in seconds since 1970. client_id: whose it was.
    notes: what the trainer noted about the sample; of several notes with one name the last one.
    """

    result: RolloutResult
    job: GenerateJob | None
    at: float
    client_id: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        """Job and sample, as people write them: "0192….3"."""
        return f"{self.result.job_id}.{self.result.sample}"

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32] | None:
        """(p,) int32. None if neither the result nor the job has them."""
        if self.result.prompt_ids is not None:
            return self.result.prompt_ids
        return None if self.job is None else self.job.token_ids

    def spans(self) -> list[Span]:
        """The sample's tokens by version, in order."""
        found, place = [], 0
        for version, tokens in self.result.segments:
            found.append(Span(version, place, place + tokens))
            place += tokens
        return found

    def facts(self) -> dict[str, Any]:
        """What an expression may name: plain values. Notes come last and win; metadata is below them."""
        result, logprobs = self.result, self.result.logprobs
        known = logprobs if logprobs is not None and logprobs.size else None
        facts: dict[str, Any] = dict(result.metadata)
        facts |= {
            "job": result.job_id, "sample": result.sample, "group": result.group_id, "client": self.client_id,
            "worker": result.worker_id, "attempt": result.attempt, "finish": result.finish_reason, "at": self.at,
            "tokens": int(result.token_ids.size), "versions": len(result.segments),
            "version": result.segments[-1].version if result.segments else None,
            "oldest": result.oldest_version, "lora": result.adapter, "queued": result.timings.queued,
            "generating": result.timings.generating,
            "logprob": None if known is None else float(known.mean()),
            "lowest_logprob": None if known is None else float(known.min()),
        }  # fmt: skip
        return facts | dict(self.notes)


class Where:
    """An expression over a sample's facts, such as `reward < 0 and staleness > 2`.

    It is evaluated by simpleeval: arithmetic, comparisons, `and`, `or`, `not`, `in`, texts and numbers; no functions
    but abs, min and max, no attributes. A sample that lacks a name of it, or has None there, does not match.
    Raises InvalidField for a text that is no expression, and ConfigError if simpleeval is not installed.
    """

    def __init__(self, text: str) -> None:
        try:
            from simpleeval import EvalWithCompoundTypes  # noqa: PLC0415  # only expressions need it
        except ModuleNotFoundError:
            raise ConfigError("--where needs simpleeval: pip install 'rolloutmq[replay]'") from None
        self.text = text
        self._evaluator = EvalWithCompoundTypes(functions={"abs": abs, "min": min, "max": max}, allowed_attrs={})
        for node in (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.JoinedStr):
            self._evaluator.nodes.pop(node, None)  # nested loops could take any time, and a format any memory
        self._evaluator.operators |= {ast.Mod: _remainder, ast.Pow: _power}
        try:
            self._parsed = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise InvalidField("where", text, f"an expression such as reward < 0 and staleness > 2: {error}") from None

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether the expression is true of these facts. Raises InvalidField for one that cannot be computed."""
        from simpleeval import NameNotDefined  # noqa: PLC0415

        self._evaluator.names = {name: value for name, value in facts.items() if value is not None}
        try:
            return bool(self._evaluator.eval(self.text, self._parsed))
        except NameNotDefined:
            return False
        except Exception as error:  # of the expression: whatever its operators raise
            raise InvalidField("where", self.text, f"something that can be computed: {error}") from None


def _remainder(value: Any, divisor: Any) -> Any:
    """`%` of a text is a format, which may be of any length."""
    if isinstance(value, str | bytes):
        raise TypeError("% takes numbers")
    return value % divisor


def _power(value: Any, exponent: Any) -> Any:
    if abs(exponent) > 1000 or abs(value) > 1e100:
        raise ValueError("the numbers of a power are too large")
    return value**exponent


def recorded(
    folder: Path | str,
    *,
    jobs: Collection[str] | None = None,
    where: Where | None = None,
    on_problem: Callable[[str], None] = log.warning,
    on_unread: Callable[[str], None] = log.warning,
    **filters: Any,
) -> Iterator[Recorded]:
    """The samples of a journal that fit all that is given, in the order in which their results arrived.

    jobs: ids of jobs, and of single samples as JOB.SAMPLE. filters: of the results, as `messages.journal.read` takes
    them (version, since, …). Jobs before and notes after them are found. A result that came twice counts once.
    on_problem: as `messages.journal.read` takes it; it gets each line once. on_unread: gets a line for each chosen
    result that cannot be read.
    Memory: some results with their jobs and notes at a time, and the names of the chosen samples, however large the
    journal is.
    Raises ConfigError, InvalidField.
    """
    on_problem = _once(on_problem)  # the same files are read several times
    names = None if jobs is None else set(jobs)
    ids = None if names is None else {name.partition(".")[0] for name in names}
    results = read(folder, job=ids, events="result", on_problem=on_problem, **filters)
    seen: set[Place] = set()
    for some in _batches(results):
        asked, notes = _about({entry.job_id for entry in some}, folder, on_problem)
        for entry in some:
            place, name = (entry.job_id, entry.sample), f"{entry.job_id}.{entry.sample}"
            if place in seen or (names is not None and not names & {entry.job_id, name}):
                continue
            result, problem = content(entry)
            if problem:
                seen.add(place)
                on_unread(f"the result {name} cannot be read: {problem}")
            if not isinstance(result, RolloutResult):
                continue
            job, problem = content(asked[entry.job_id]) if entry.job_id in asked else (None, "")
            found = Recorded(
                result,
                job if isinstance(job, GenerateJob) else None,
                entry.at,
                entry.client_id,
                notes.get((entry.job_id, -1), {}) | notes.get(place, {}),
                f"its job cannot be read: {problem}" if problem else "",
            )
            if where is None or where.matches(found.facts()):
                seen.add(place)
                yield found


def _once(told: Callable[[str], None]) -> Callable[[str], None]:
    seen: set[str] = set()

    def tell(line: str) -> None:
        if line not in seen:
            seen.add(line)
            told(line)

    return tell


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    """The entries, some at a time: few at first, because often the first ones are enough."""
    most, taken, nbytes = FIRST_BATCH, list[Entry](), 0
    for entry in entries:
        taken.append(entry)
        nbytes += len(entry.content) if isinstance(entry.content, bytes) else 0
        if len(taken) >= most or nbytes >= BATCH_BYTES:
            yield taken
            most, taken, nbytes = min(2 * most, BATCH), [], 0
    if taken:
        yield taken


def _about(
    job_ids: set[str], folder: Path | str, on_problem: Callable[[str], None]
) -> tuple[dict[str, Entry], dict[Place, Notes]]:
    """The entries of these jobs, and what was noted about their samples. An index says where both are."""
    asked: dict[str, Entry] = {}
    notes: dict[Place, Notes] = {}
    for entry in read(folder, job=job_ids, events=("job", "note"), on_problem=on_problem):
        if entry.event == "job":
            asked.setdefault(entry.job_id, entry)
        else:
            notes.setdefault((entry.job_id, entry.sample), {}).update(entry.data)
    return asked, notes
