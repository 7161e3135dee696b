"""A journal of a million results: what it takes on disk, how fast it is written, and how soon one job is found in it.

    python -m benchmarks journal --out benchmarks/results/journal-cpu.json

Every result has an entry and a job's id of its own. Token ids are drawn as in text (Zipf), and log-probabilities are
random float32: nothing compresses better than in a run. Cold: a new process, after the kernel dropped the files' pages.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolloutmq import RolloutResult, SamplingParams
from rolloutmq.messages import GenerateJob, Segment, encode, new_id
from rolloutmq.messages.journal import Journal, read

from .harness import Run, option
from .parts import Part

KINDS = 4096
"""So many different results are drawn; 100 times a block of the journal, so no block has one twice."""
BATCH, QUERIES = 256, 9
TOKENS = 256
"""Of a result, the median."""
VOCABULARY = 151_936


def drawn() -> list[RolloutResult]:
    """Results with log-normal lengths, as in the other benchmarks."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(KINDS):
        count = int(np.clip(rng.lognormal(np.log(TOKENS), 0.5), 1, 8 * TOKENS))
        ids = np.minimum(rng.zipf(1.2, count), VOCABULARY - 1).astype(np.int32)
        logprobs = -rng.exponential(0.6, count).astype(np.float32)
        split = count // 2
        segments = [Segment(7, split), Segment(8, count - split)] if split else [Segment(8, count)]
        made.append(
            RolloutResult(
                job_id=new_id(),
                sample=0,
                n=1,
                group_id="g",
                token_ids=ids,
                logprobs=logprobs,
                finish_reason="stop",
                segments=segments,
                worker_id="worker-0",
                attempt=1,
                fingerprint={"engine": "sglang", "device": "cpu"},
            )
        )
    return made


def written(folder: Path, results: int) -> tuple[dict[str, Any], list[str]]:
    """Write the journal. Returns the figures, and ids to look for."""
    kinds = drawn()
    frames = [encode(one) for one in kinds]
    sizes = [len(one.token_ids) for one in kinds]
    job = GenerateJob(
        token_ids=list(range(100)), sampling=SamplingParams(max_new_tokens=8 * TOKENS), reply_to="trainer"
    )
    some, total = [], 0
    begun, cpu = time.perf_counter(), time.process_time()
    with Journal(folder) as journal:
        for start in range(0, results, BATCH):
            places = [number % KINDS for number in range(start, min(start + BATCH, results))]
            outcomes = [kinds[place].model_copy(update={"job_id": new_id()}) for place in places]
            jobs = [job.model_copy(update={"id": one.job_id}) for one in outcomes]
            journal.jobs(jobs, [None] * len(jobs))
            journal.outcomes(outcomes, "trainer", [frames[place] for place in places])
            total += sum(sizes[place] for place in places)
            some.append(outcomes[0].job_id)
            if start // BATCH % 64 == 63:
                journal.flush()  # nothing waits for the disk by itself: it would drop entries
        lost = journal.lost
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    figures = {
        "results": results, "jobs": results, "tokens": total, "lost": lost, "segments": len(list(folder.iterdir())),
        "bytes": nbytes, "bytes_per_token": round(nbytes / total, 3), "bytes_per_result": round(nbytes / results, 1),
        "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "results_per_s": round(results / seconds),
        "tokens_per_s": round(total / seconds), "megabytes_per_s": round(nbytes / 1e6 / seconds, 1),
    }  # fmt: skip
    return figures, some


def forgotten(folder: Path) -> None:
    """Have the kernel drop the pages of the journal's files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def found(folder: Path, job_id: str) -> dict[str, Any]:
    forgotten(folder)
    with Part(find, str(folder), job_id) as process:
        query, events = process.answer()
    assert events == ["job", "result"], events
    return {"query_s": round(query, 4)}


def find(folder: str, job_id: str) -> None:
    """A new process, which has read nothing yet."""
    begun = time.perf_counter()
    events = [entry.event for entry in read(Path(folder), job=job_id)]
    print(json.dumps([time.perf_counter() - begun, events]))


def scanned(folder: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    entries = sum(1 for _ in read(folder))
    seconds = time.perf_counter() - begun
    return {"entries": entries, "seconds": round(seconds, 1), "entries_per_s": round(entries / seconds)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write."""

    results: int = option(1_000_000, "Of a journal.", min=1)
    rounds: int = option(1, "Journals that are written, one after the other.", min=1)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """A journal of many results: bytes for each token, the rate of writing, and how soon one job is found."""
    rounds: list[dict[str, Any]] = []
    for _ in range(plan.rounds):
        with tempfile.TemporaryDirectory() as place:
            figures, some = written(Path(place), plan.results)
            run.say(**figures)
            ids = [some[number * len(some) // QUERIES] for number in range(QUERIES)]
            queries = [found(Path(place), job_id) for job_id in ids]
            seconds = [one["query_s"] for one in queries]
            told = {"median_s": statistics.median(seconds), "slowest_s": max(seconds), "each": queries}
            rounds.append({"written": figures, "cold_query_by_job_id": told, "scan": scanned(Path(place))})
    return {"tokens": f"log-normal around {TOKENS}", "rounds": rounds}
