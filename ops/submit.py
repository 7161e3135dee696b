"""`rolloutmq submit`: reads a file of prompts and writes a file of answers. Every line is answered exactly once.

Answers are appended to `OUT.part` as they come. When all are there, they are sorted into `OUT`. The first line of
`OUT.part` holds the ids under which the lines were submitted. So the same command finds its own jobs again, after
whatever stopped it: finished ones on its reply stream, running ones in the pool. Answers are synced to the disk once a
second and at the end, and the pool drops them only after that. A power cut loses no answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..messages.codec import encode
from ..messages.dialects import job_fields
from ..messages.errors import ConfigError, FeatureUnavailable, InvalidField
from ..messages.model import GenerateJob, JobFailure, RolloutResult, SamplingParams, as_invalid_field
from ..producer.client import Outcome, RolloutClient
from .files import check_out, json_lines, lines
from .records import Records, sync_folder
from .redis import reach
from .terminal import ProgressLine, printable

SAMPLING = "sampling"


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings for lines that have none of their own. logprobs: whether to write them. lora: None for no adapter."""

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    logprobs: bool = False
    lora: str | None = None


def submit_file(
    file: Path,
    out: Path,
    redis_url: str,
    pool: str,
    defaults: Defaults,
    *,
    window: int = 1024,
    overwrite: bool = False,
    as_json: bool = False,
) -> int:
    """Answer every line of `file` in `out`. Returns the exit code: 0, 1 if lines failed, 130 if interrupted.

    window: jobs that are outstanding at a time. as_json: print {"out", "lines", "open", "failed"} to stdout at the end.
    Progress goes to stderr.

    Raises InvalidField before anything is submitted, for a line that is no job and for files that cannot be read or
    written. Raises ConfigError for files that do not belong together, and if writing fails later: what was not written
    stays in the pool. Raises RedisUnavailable.
    """
    check_out("--out", out)
    if out.exists() and file.exists() and out.samefile(file):
        raise InvalidField("--out", str(out), "another file than the one with the prompts")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists and is complete; remove it or give --overwrite")
    jobs, digest = read_jobs(file, defaults)
    reach(redis_url, pool)
    work = Work(out, jobs, {"input": digest} | asdict(defaults))
    try:
        code = asyncio.run(_run(work, redis_url, pool, defaults, window))
        if as_json:
            left = {"open": len(work.open_lines), "failed": len(work.failed)}
            print(json.dumps({"out": str(out), "lines": len(jobs)} | left))
        return code
    finally:
        work.close()


def read_jobs(file: Path, defaults: Defaults) -> tuple[dict[int, dict[str, Any]], str]:
    """The fields of each line's job, and the file's digest. The file may be a pipe, so it is read once."""
    digest = hashlib.sha256()

    def read() -> Iterator[bytes]:
        for line in lines("FILE", file):
            digest.update(line)
            yield line

    jobs = {number: line_fields(f"line {number}", given, defaults) for number, given in json_lines(read())}
    if not jobs:
        raise ConfigError(f"{file} has no line to answer")
    return jobs, digest.hexdigest()


def line_fields(where: str, given: Any, defaults: Defaults) -> dict[str, Any]:
    """The job's fields of one line. They are checked by building and encoding the job once."""
    if isinstance(given, str):
        given = {"text": given}
    if not isinstance(given, dict):
        raise InvalidField(where, given, "an object with text, messages or token_ids, or a string")
    if taken := sorted({"id", "reply_to", "metadata"} & given.keys()):
        raise InvalidField(f"{where}.{taken[0]}", given[taken[0]], "not given: the command uses it itself")
    sampling = given.get(SAMPLING, {})
    if not isinstance(sampling, dict):
        raise InvalidField(f"{where}.{SAMPLING}", sampling, "an object of sampling parameters")
    try:
        told = job_fields(sampling)  # in whatever words; some are about the job
    except InvalidField as error:
        raise InvalidField(f"{where}.{SAMPLING}.{error.field}", error.value, error.allowed) from None
    own: SamplingParams = told.pop(SAMPLING, SamplingParams())
    usual = {"max_new_tokens": defaults.max_new_tokens, "temperature": defaults.temperature}
    adapter = {} if defaults.lora is None else {"lora": defaults.lora}
    fields = {"n": defaults.n} | adapter | told | given | {SAMPLING: usual | own.model_dump(exclude_unset=True)}
    try:
        encode(GenerateJob(**fields))
    except (ValidationError, InvalidField) as error:
        invalid = as_invalid_field(error) if isinstance(error, ValidationError) else error
        raise InvalidField(f"{where}.{invalid.field}", invalid.value, invalid.allowed) from None
    return fields


class Work:
    """The lines, and which of them are answered. Every answer is on disk as soon as it is known here.

    asked: must be the same each time the command is given.
    """

    def __init__(self, out: Path, lines: dict[int, dict[str, Any]], asked: dict[str, Any]) -> None:
        self.out, self.lines = out, lines
        self.part = out.with_name(out.name + ".part")
        self.answered: dict[int, set[int]] = {}
        self.failed: set[int] = set()
        self.open_lines = set(lines)
        base = f"{int(time.time() * 1000):012x}{secrets.token_hex(6)}"
        begin = {"base": base, "client": f"submit-{base}"}
        self._records = Records("--out", self.part, "submit", asked=asked, begin=begin, restore=self._restore)
        self.sync = self._records.sync

    def _restore(self, first: dict[str, Any], records: list[Any]) -> None:
        self.base, self.client_id = _known(first)
        for record in records:
            line, sample = record["line"], record.get("sample")
            if line not in self.lines or (sample is not None and sample < 0):
                raise ValueError("an answer to another line")
            self._note(line, sample)

    def _note(self, line: int, sample: int | None) -> None:
        if sample is None:
            self.failed.add(line)
        else:
            self.answered.setdefault(line, set()).add(sample)
        if line in self.failed or len(self.answered[line]) >= self.lines[line]["n"]:
            self.open_lines.discard(line)

    def jobs(self) -> Iterator[GenerateJob]:
        """A job for each open line. Its id ends with the line number."""
        for line in sorted(self.open_lines):
            yield GenerateJob(id=f"{self.base}{line:08x}", metadata={"line": line}, **self.lines[line])

    def take(self, outcome: Outcome, logprobs: bool) -> bool:
        """Write an answer down. False if it was there already, or belongs to another run."""
        if not outcome.job_id.startswith(self.base):
            return False
        line = int(outcome.job_id[len(self.base) :], 16)
        if line not in self.open_lines:
            return False
        record: dict[str, Any] = {"line": line}
        for name in ("text", "messages"):
            if name in self.lines[line]:
                record["prompt"] = self.lines[line][name]
        if isinstance(outcome, RolloutResult):
            if outcome.sample in self.answered.get(line, ()):
                return False
            record |= {
                "sample": outcome.sample,
                "text": outcome.text,
                "finish_reason": outcome.finish_reason,
                "segments": [list(segment) for segment in outcome.segments],
                "adapter": outcome.adapter,
                "adapter_segments": None
                if outcome.adapter is None
                else [list(s) for s in outcome.adapter_segments or ()],
                "token_ids": outcome.token_ids.tolist(),
                "worker": outcome.worker_id,
                "attempt": outcome.attempt,
            }
            if logprobs and outcome.logprobs is not None:
                record["logprobs"] = [round(float(value), 6) for value in outcome.logprobs]
        else:
            record["error"] = {"outcome": outcome.outcome, "cause": outcome.cause, "detail": outcome.error}
        self._records.write({name: value for name, value in record.items() if value is not None})
        self._note(line, record.get("sample"))
        return True

    def finish(self) -> None:
        """Sort the answers by line and sample into the output file. Raises ConfigError: they stay in the other file."""
        sorted_part = self.out.with_name(self.out.name + ".sorted")
        try:
            with self.part.open(encoding="utf-8") as source:
                source.readline()
                records = sorted((r["line"], r.get("sample", -1), text) for text in source if (r := json.loads(text)))
            with sorted_part.open("w", encoding="utf-8") as target:
                target.writelines(text for _, _, text in records)
                target.flush()
                os.fsync(target.fileno())
            os.replace(sorted_part, self.out)
            sync_folder(self.out)
            self.part.unlink()
        except OSError as error:
            sorted_part.unlink(missing_ok=True)
            raise ConfigError(
                f"{self.out} cannot be written: {error.strerror or error}. The answers are in {self.part}; "
                "the same command goes on from there"
            ) from error

    def close(self) -> None:
        self._records.close()


def _known(first: dict[str, Any]) -> tuple[str, str]:
    """The ids in the first line of a `.part`. Raises ValueError, KeyError or TypeError for a line of another origin."""
    if not re.fullmatch("[0-9a-f]{24}", first["base"]) or not re.fullmatch("[a-z0-9-]{1,128}", first["client"]):
        raise ValueError("no ids")
    return first["base"], first["client"]


async def _refuse(work: Work, client: RolloutClient, logprobs: bool) -> None:
    """Write an error for each line that no worker can run, so that it does not stop the others."""
    for job in work.jobs():
        try:
            await client.check([job])
        except FeatureUnavailable as error:
            work.take(JobFailure(job_id=job.id, outcome="dead", cause="refused", error=str(error)), logprobs)


async def _run(work: Work, redis_url: str, pool: str, defaults: Defaults, window: int) -> int:
    task = asyncio.current_task()
    assert task is not None
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    if resumed := len(work.lines) - len(work.open_lines):
        _tell(f"going on: {resumed} of {len(work.lines)} lines are answered")
    try:
        await _answer(work, redis_url, pool, defaults, window)
    except asyncio.CancelledError:
        if not interrupted:
            raise
        _tell(f"stopped: {len(work.open_lines)} lines are open. The same command goes on from here.")
        return 130
    if work.open_lines:
        _tell(f"{len(work.open_lines)} lines were answered, but somebody else took the answers")
        return 1
    work.finish()
    _tell(f"{len(work.lines)} lines answered in {work.out}, {len(work.failed)} of them with an error")
    return 1 if work.failed else 0


async def _answer(work: Work, redis_url: str, pool: str, defaults: Defaults, window: int) -> None:
    began, tokens, before = time.monotonic(), 0, len(work.open_lines)
    async with RolloutClient(redis_url, pool, client_id=work.client_id, before_ack=work.sync) as client:
        if not await client.workers():
            _tell(f"no worker serves pool {pool!r} yet; waiting for one")
        await _refuse(work, client, defaults.logprobs)
        with ProgressLine() as line:
            async for outcome in client.map(work.jobs(), window=window):
                if work.take(outcome, defaults.logprobs) and isinstance(outcome, RolloutResult):
                    tokens += len(outcome.token_ids)
                took, left = time.monotonic() - began, len(work.open_lines)
                left_s = took * left / max(1, before - left)
                rate = f"{tokens / max(1e-3, took):.0f} tok/s, about {left_s / 60:.0f} min left"
                line.show(len(work.lines) - left, len(work.lines), rate)


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr)
