"""Compares what was promised with what happened. Every rule is proved by a lie in tests/house/test_chaos_oracle.py.

(a) One terminal outcome per accepted job; a done job's samples published once each, a failed job's failure told once;
    each of them handed to the client, once per process.
(b) Nothing published by a fenced attempt, nor after the end; nothing claimed from under its owner.
(c) Version tags true (the scripted tokens say so) and never going back on one worker, in each shard. Samples have the
    adapter that their job asked for, in versions that were published and are not older than it demands.
(d) After the drain nothing is left but what has a TTL or is on the list in baseline.py, and the counters add up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from support.pools.pool import check_scripted

from rolloutmq.messages import GenerateJob, RolloutResult
from rolloutmq.messages.codec import JOBS, RESULTS, Result, decode_one_of
from rolloutmq.messages.errors import MessageError

from .journal import FAILURE, Received, Submitted, digest
from .ledger import Event


@dataclass(slots=True)
class Verdict:
    """violations: (rule, text). The numbers go to out/chaos.json."""

    violations: list[tuple[str, str]] = field(default_factory=list)
    lost: int = 0
    duplicates: int = 0
    fenced_published: int = 0
    leaked_keys: int = 0
    handed_again: int = 0
    with_adapter: int = 0
    unlogged: int = 0

    def complain(self, rule: str, text: str) -> None:
        self.violations.append((rule, text))


@dataclass(frozen=True, slots=True)
class Terms:
    """What a scenario lets pass, and what it does not.

    scripted: tokens can be checked against their position and version.
    unreadable: jobs whose replies were made unreadable on purpose.
    tampered: jobs whose records were, which may end in any way, and whose counters may be off.
    forgotten: the server lost accepted jobs. They are counted, and their clients have to be told.
    lossless: no worker died here, so no job may be counted as lost.
    unread: clients that never came back for their results.
    giving_up: clients that cancel calls: what those had asked for need not be handed to them.
    rewound: the server came back with an older state, and clients may have been handed what is in no log (`unlogged`).
    elsewhere: what a server that is gone had published.
    adapters: (name, version) of every LoRA adapter that was published.
    """

    scripted: bool = True
    unreadable: frozenset[str] = frozenset()
    tampered: frozenset[str] = frozenset()
    forgotten: bool = False
    lossless: bool = False
    unread: frozenset[str] = frozenset()
    giving_up: frozenset[str] = frozenset()
    rewound: bool = False
    elsewhere: frozenset[tuple[str, int, str]] = frozenset()
    adapters: frozenset[tuple[str, int]] = frozenset()


def judge(
    events: list[Event], submitted: list[Submitted], received: list[Received], terms: Terms | None = None
) -> Verdict:
    """Rules (a) to (c); (d) is `baseline.judge_rest`."""
    terms = terms or Terms()
    verdict = Verdict()
    prompts = {job.job: job.prompt for job in submitted}
    outcomes = _outcomes(events, verdict, terms)
    sound = [event for event in events if event.job not in terms.tampered]
    _fencing(sound, verdict)
    published = _results(sound, prompts, verdict, terms)
    lost = _lost(events, submitted, received, verdict, terms)
    _reception(outcomes, published, received, verdict, terms, lost=lost)
    if not terms.rewound:
        _acknowledged(events, verdict)
    losses = [event.job for event in events if event.kind == "lost"]
    if terms.lossless and losses:
        verdict.complain("a", f"jobs were counted as lost, though no worker died: {losses}")
    return verdict


# --- (a) what became of each job --------------------------------------------------------------------------------------


def _outcomes(events: list[Event], verdict: Verdict, terms: Terms) -> dict[tuple[str, int], str]:
    """(job, sample or FAILURE) -> the client that must have it."""
    by_job: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.job:
            by_job[event.job].append(event)
    due: dict[tuple[str, int], str] = {}
    for job_id, story in by_job.items():
        if job_id not in terms.unreadable | terms.tampered:
            _one_job(job_id, story, due, verdict)
    return due


def _lost(
    events: list[Event], submitted: list[Submitted], received: list[Received], verdict: Verdict, terms: Terms
) -> set[str]:
    """The jobs that a server has lost. A client that has no outcome of one was never told."""
    accepted = {event.job for event in events if event.kind == "accept"}
    lost = {job.job: job.client for job in submitted if job.job not in accepted}
    verdict.lost += len(lost)
    told = {got.job for got in received}
    for job, client in lost.items():
        if not terms.forgotten:
            verdict.complain("a", f"job {job} was accepted and the server knows nothing of it")
        elif job not in told and client not in terms.unread | terms.giving_up:
            verdict.complain("a", f"{client} was never told that the server has lost job {job}")
    return set(lost) if terms.forgotten else set()


def _one_job(job_id: str, story: list[Event], due: dict[tuple[str, int], str], verdict: Verdict) -> None:
    kinds = Counter(event.kind for event in story)
    if kinds["accept"] != 1:
        verdict.duplicates += max(0, kinds["accept"] - 1)
        verdict.complain("a", f"job {job_id} was accepted {kinds['accept']} times")
        return
    accept = next(event for event in story if event.kind == "accept")
    ends = [event for event in story if event.kind == "terminal"]
    if len(ends) != 1:
        verdict.lost += not ends
        verdict.duplicates += max(0, len(ends) - 1)
        verdict.complain("a", f"job {job_id} has {len(ends)} terminal outcomes: {[end.outcome for end in ends]}")
    samples = Counter(event.sample for event in story if event.kind == "publish")
    for sample, times in samples.items():
        due[job_id, sample] = accept.client
        if times > 1:
            verdict.duplicates += times - 1
            verdict.complain("a", f"sample {sample} of job {job_id} was published {times} times")
    failures = [event for event in story if event.kind == "failure"]
    if failures:
        due[job_id, FAILURE] = accept.client
    for end in ends[:1]:
        _one_end(end, range(accept.n), set(samples), (failures, kinds["letter"]), verdict)


def _one_end(end: Event, expected: range, samples: set[int], told: tuple[list[Event], int], verdict: Verdict) -> None:
    failures, letters = told
    if end.outcome == "done":
        if missing := set(expected) - samples:
            verdict.lost += len(missing)
            verdict.complain("a", f"job {end.job} is done without its samples {sorted(missing)}")
        if failures:
            verdict.complain("a", f"job {end.job} is done, and its client was told that it is {failures[0].outcome}")
    elif [failure.outcome for failure in failures] != [end.outcome]:
        verdict.lost += not failures
        verdict.duplicates += max(0, len(failures) - 1)
        heard = [failure.outcome for failure in failures]
        verdict.complain("a", f"job {end.job} is {end.outcome}; its client was told {heard}")
    elif not failures[0].cause or letters != (end.outcome == "dead"):
        verdict.complain("a", f"job {end.job} is {end.outcome}: cause {failures[0].cause!r}, {letters} dead letters")
    if not samples <= set(expected):
        verdict.complain("a", f"job {end.job} has {len(expected)} samples, published are {sorted(samples)}")


# --- (b) who may say what ---------------------------------------------------------------------------------------------


def _fencing(events: list[Event], verdict: Verdict) -> None:
    attempts: dict[str, int] = {}
    for event in events:
        if event.kind == "claim":
            if event.was != "q":
                verdict.complain("b", f"{event.worker} claimed job {event.job} in state {event.was or 'unknown'}")
            if event.attempt != attempts.get(event.job, 0) + 1:
                verdict.complain(
                    "b", f"attempt {event.attempt} of job {event.job} follows {attempts.get(event.job, 0)}"
                )
            attempts[event.job] = event.attempt
        elif event.kind == "publish":
            try:
                result = _result(event)
            except MessageError:
                continue  # put there by hand; whoever reads it finds out
            if event.state != "r":
                verdict.fenced_published += 1
                verdict.complain("b", f"job {event.job} was published in state {event.state or 'unknown'}")
            elif (result.worker_id, result.attempt) != (event.worker, event.attempt):
                verdict.fenced_published += 1
                verdict.complain(
                    "b",
                    f"job {event.job} was published by {result.worker_id} in attempt {result.attempt}; "
                    f"it belonged to {event.worker} in attempt {event.attempt}",
                )


def _result(event: Event) -> Result:
    result: Result = decode_one_of(event.payload, RESULTS)
    return result


# --- (c) which weights ------------------------------------------------------------------------------------------------


def _results(
    events: Iterable[Event], prompts: dict[str, int], verdict: Verdict, terms: Terms
) -> dict[tuple[str, int], str]:
    """Digest of every published result."""
    digests: dict[tuple[str, int], str] = {}
    newest: dict[int, dict[str, int]] = defaultdict(dict)  # shards publish independently
    wanted: dict[str, tuple[str | None, int]] = {}
    for event in events:
        if event.kind == "accept":
            wanted[event.job] = _adapter_of(event)
        if event.kind == "accept" and event.job not in prompts:
            prompts[event.job] = -1  # accepted, though its submission failed: its prompt is not in any journal
        if event.kind != "publish":
            continue
        try:
            result = _result(event)
        except MessageError:
            continue
        digests[event.job, event.sample] = digest(result)
        if (result.job_id, result.sample) != (event.job, event.sample):
            verdict.complain("c", f"published as {event.job}/{event.sample} was {result.job_id}/{result.sample}")
        if isinstance(result, RolloutResult):
            _one_result(result, prompts.get(event.job, -1), newest[event.shard], verdict, terms)
            _one_adapter(result, *wanted.get(event.job, (None, 0)), verdict, terms)
    return digests


def _adapter_of(accepted: Event) -> tuple[str | None, int]:
    """The adapter that a job asks for, and the oldest version it may have."""
    try:
        job = decode_one_of(accepted.payload, JOBS)
    except MessageError:
        return None, 0  # put there by hand
    return (job.lora, job.min_adapter_version) if isinstance(job, GenerateJob) else (None, 0)


def _one_adapter(result: RolloutResult, name: str | None, oldest: int, verdict: Verdict, terms: Terms) -> None:
    versions = [segment.version for segment in result.adapter_segments or ()]
    sample = f"{result.job_id}/{result.sample}"
    if result.adapter != name or bool(versions) != (name is not None and bool(result.segments)):
        verdict.complain("c", f"{sample}: adapter {result.adapter} {versions}, the job asked for {name}")
    elif versions and (versions != sorted(versions) or versions[0] < oldest):
        verdict.complain("c", f"{sample}: versions {versions} of {name}, the job asked for {oldest} or newer")
    elif unknown := [version for version in versions if (name, version) not in terms.adapters]:
        verdict.complain("c", f"{sample}: versions {unknown} of {name} were never published")
    verdict.with_adapter += bool(versions)


def _one_result(result: RolloutResult, prompt: int, newest: dict[str, int], verdict: Verdict, terms: Terms) -> None:
    if result.prompt_ids is not None:
        prompt = len(result.prompt_ids)
    if terms.scripted and prompt >= 0:
        try:
            check_scripted(result, prompt)
        except AssertionError:
            verdict.complain("c", f"{result.job_id}/{result.sample}: tokens that {result.segments} did not sample")
    if result.segments:
        last = result.segments[-1].version
        if last < newest.get(result.worker_id, 0):
            verdict.complain("c", f"{result.worker_id} published version {last} after {newest[result.worker_id]}")
        newest[result.worker_id] = max(last, newest.get(result.worker_id, 0))


# --- (a) what the clients got -----------------------------------------------------------------------------------------


def _reception(
    due: dict[tuple[str, int], str],
    published: dict[tuple[str, int], str],
    received: list[Received],
    verdict: Verdict,
    terms: Terms,
    *,
    lost: set[str],
) -> None:
    runs = Counter((got.client, got.run, got.job, got.sample) for got in received)
    for (client, run, job, sample), times in runs.items():
        if times > 1:
            verdict.duplicates += times - 1
            verdict.complain("a", f"{client} was handed {job}/{sample} {times} times in one process ({run})")
    handed = {(got.client, got.job, got.sample) for got in received}
    verdict.handed_again = len(runs) - len(handed)
    for (job, sample), client in due.items():
        excused = terms.unread | terms.giving_up
        if client not in excused and (client, job, sample) not in handed and job not in terms.unreadable:
            verdict.lost += 1
            verdict.complain("a", f"{client} was never handed {job}/{sample}")
    for got in received:
        if got.job in terms.unreadable | terms.tampered or (got.job, got.sample, got.digest) in terms.elsewhere:
            continue
        if terms.rewound and published.get((got.job, got.sample), "") != got.digest:
            verdict.unlogged += 1
        elif (got.job, got.sample) not in due and got.job not in lost:
            verdict.complain("a", f"{got.client} was handed {got.job}/{got.sample}, which nobody published")
        elif got.sample != FAILURE and got.job not in lost and published.get((got.job, got.sample)) != got.digest:
            verdict.complain(
                "a", f"{got.client} was handed something else than was published as {got.job}/{got.sample}"
            )


def _acknowledged(events: list[Event], verdict: Verdict) -> None:
    known: set[tuple[str, str]] = set()
    for event in events:
        if event.kind in {"publish", "failure"}:
            known.add((event.client, event.entry))
        elif event.kind == "ack" and (event.client, event.entry) not in known:
            verdict.complain("a", f"{event.client} acknowledged {event.entry}, which had not been published")


def handed_out(events: Iterable[Event]) -> frozenset[tuple[str, int, str]]:
    """Job, sample and digest of whatever was published: what clients of this server may have got."""
    found = {(event.job, FAILURE, "") for event in events if event.kind == "failure"}
    for event in events:
        if event.kind == "publish":
            found.add((event.job, event.sample, digest(_result(event))))
    return frozenset(found)
