"""What the driver and its clients know by themselves: jobs that were accepted, outcomes that were handed to them.

Append-only files of JSON lines, one per process: a client that is killed leaves what it had written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutmq.messages import GenerateJob, JobFailure, RolloutResult, encode
from rolloutmq.messages.model import TaskResult

FAILURE = -1


@dataclass(frozen=True, slots=True)
class Submitted:
    """`submit` returned for this job."""

    job: str
    n: int
    prompt: int
    client: str


@dataclass(frozen=True, slots=True)
class Received:
    """An outcome was handed to the code that uses a client. run: which process of that client id it was."""

    client: str
    run: str
    job: str
    sample: int
    outcome: str
    digest: str


class Journal:
    """Writes one file of lines; `run` names the process in them."""

    def __init__(self, directory: Path, run: str) -> None:
        self.run = run
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{run}.jsonl").open("a", buffering=1)

    def submitted(self, job: GenerateJob, client: str) -> None:
        prompt = 0 if job.token_ids is None else len(job.token_ids)
        self._write({"submitted": {"job": job.id, "n": job.n, "prompt": prompt, "client": client}})

    def received(self, outcome: RolloutResult | TaskResult | JobFailure, client: str) -> None:
        failed = isinstance(outcome, JobFailure)
        sample, how = (FAILURE, outcome.outcome) if failed else (outcome.sample, "ok")
        line = {"client": client, "run": self.run, "job": outcome.job_id, "sample": sample, "outcome": how}
        self._write({"received": line | {"digest": digest(outcome)}})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


def digest(outcome: RolloutResult | TaskResult | JobFailure) -> str:
    """Of what was generated, and where; empty for a failure."""
    if isinstance(outcome, JobFailure):
        return ""
    if isinstance(outcome, TaskResult):
        return hashlib.blake2b(encode(outcome), digest_size=8).hexdigest()
    told = f"{outcome.segments}{outcome.adapter_segments}{outcome.attempt}{outcome.worker_id}".encode()
    return hashlib.blake2b(outcome.token_ids.tobytes() + told, digest_size=8).hexdigest()


def read(directory: Path) -> tuple[list[Submitted], list[Received]]:
    """Everything in the journals; the half line of a killed process was never handed over."""
    submitted, received = [], []
    for path in sorted(directory.glob("*.jsonl")):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                line = json.loads(text)
                if "submitted" in line:
                    submitted.append(Submitted(**line["submitted"]))
                else:
                    received.append(Received(**line["received"]))
    return submitted, received
