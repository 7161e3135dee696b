"""What a worker writes into a journal: its claims, what it saves and publishes, its weights, its own life.

Tokens and log-probabilities are not written again: the job's client has them in its own journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from ..messages.broker import Beat, Claim, Finished, Lease, Piece, Release, ShardedLease, Witness
from ..messages.errors import RequestRefused
from ..messages.journal import Entry, Journal, Record, attempt_record, of_announcement, versions_of
from ..messages.model import Command, CommandReply, UpdateMode, WeightAnnouncement, WorkerStatus
from ..sync.transfer import TransferReport
from .config import WorkerConfig

FLUSH_S = 5.0
"""So long a command that asks for a journal waits until its beginning is in the file."""


class WorkerJournal:
    """One worker's journal, over all its incarnations; while there is no folder it writes nothing.

    worker_id: the incarnation's, which every entry has.
    """

    def __init__(
        self,
        folder: str | None,
        status: Callable[[], WorkerStatus],
        claimed: Callable[[], Iterable[tuple[Claim, float]]],
    ) -> None:
        """status(), claimed(): who the worker is, and what it holds, each with the seconds since it was claimed: the
        beginning of a journal that begins while it runs. Raises ConfigError if the folder cannot be written."""
        self.worker_id = ""
        self._status, self._claimed = status, claimed
        self._journal = None if folder is None else Journal(folder)
        self._folder = "" if folder is None else _folder(folder)
        self._opening: asyncio.Future[Journal] | None = None

    async def begin(self, folder: str) -> Mapping[str, Any]:
        """Write from now on into a folder or URL; one that is written to already is left as it is.

        Returns where that is, and how many entries are in the file and lost. Raises ConfigError if it cannot be
        written, RequestRefused if the worker writes elsewhere. Neither changes anything.
        """
        if self._journal is None:
            self._opening = asyncio.ensure_future(asyncio.to_thread(Journal, folder))
            self._journal = await asyncio.shield(self._opening)  # if this is cut off, `close` ends it
            self._folder = _folder(folder)
            self.worker("present", **_identity(self._status()))
            self.attempts(_held(self.worker_id, *one) for one in self._claimed())
        elif self._folder != _folder(folder):
            raise RequestRefused(f"journal: it is written into {self._folder}; switch that off first")
        await asyncio.to_thread(self._journal.flush, FLUSH_S)
        return self._told(self._journal)

    async def end(self) -> Mapping[str, Any]:
        """Write what waits, and nothing more from now on. Returns what `begin` returns; nothing, if there was none."""
        if (journal := self._journal) is None:
            return {}
        self._journal = self._opening = None
        await asyncio.to_thread(journal.close)
        return self._told(journal) | ({"not_uploaded": left} if (left := journal.not_uploaded) else {})

    def _told(self, journal: Journal) -> dict[str, Any]:
        return {"folder": self._folder, "entries": journal.written, "lost": journal.lost}

    async def close(self) -> None:
        """Write what waits: the worker ends."""
        if self._journal is None and self._opening is not None:  # a command that was cut off
            with contextlib.suppress(Exception):  # whatever it is, the command was answered with it
                self._journal = await self._opening
        await self.end()

    def lease(self, redis: Redis, config: WorkerConfig, worker_id: str, witnesses: Sequence[Witness]) -> Lease:
        """The lease of a new incarnation, which writes down what is done under it. witnesses: one for each shard."""
        self.worker_id = worker_id
        clients = getattr(redis, "shards", ()) or (redis,)
        parts: list[Lease] = []
        for shard, (one, witness) in enumerate(zip(clients, witnesses, strict=True)):
            place = {"shard": shard, "shards": len(clients)}
            lease = RecordedLease(one, config.pool, worker_id, config.lease_s, witness, **place)
            lease.journal = self
            parts.append(lease)
        return parts[0] if len(parts) == 1 else ShardedLease(parts)

    def worker(self, what: str, **data: Any) -> None:
        """Something happened to the worker itself."""
        if self._journal is not None:
            told = {"what": what, "worker": self.worker_id} | data
            self._journal.add(Entry("worker", time.time(), data=told))

    def command(self, command: Command, reply: CommandReply) -> None:
        """A command was done, or refused."""
        error = {} if reply.ok else {"error": f"{reply.kind}: {reply.error}"}
        self.worker("command", action=command.action, params=dict(command.params), **error)

    def announced(self, announcement: WeightAnnouncement) -> None:
        """The worker takes part in a transfer."""
        if self._journal is not None:
            self._journal.add(of_announcement(announcement, time.time()))

    def updated(self, version: int, report: TransferReport, **data: Any) -> None:
        """The engine has loaded a version, or refused it. Of an update in two halves, the first half's success is not
        written."""
        if self._journal is None or (report.ok and report.phase != "done"):
            return
        took = {"seconds": report.rendezvous_s + report.receive_s + report.load_s, "load_s": report.load_s}
        told = {"what": "loaded" if report.ok else "refused", "worker": self.worker_id} | data | took
        told |= {"nbytes": report.nbytes} if report.ok else {"phase": report.phase, "error": report.error}
        self._journal.add(Entry("weights", time.time(), versions=(version,), data=told))

    def update_cost(self, mode: UpdateMode, version: int, seconds: float, tokens: int) -> None:
        """Everything that an update stopped goes on. tokens: those of which caches were computed anew."""
        if self._journal is not None:
            told = {"what": "went on", "worker": self.worker_id, "mode": mode, "seconds": seconds, "tokens": tokens}
            self._journal.add(Entry("weights", time.time(), versions=(version,), data=told))

    def attempts(self, records: Iterable[Record]) -> None:
        """Something happened to jobs that the worker holds. records: are made only if there is a journal."""
        if self._journal is not None:
            self._journal.add_records(records)


class RecordedLease(Lease):
    """A lease that writes into a journal what the worker does under it, once Redis has answered."""

    journal: WorkerJournal

    async def join(self, status: WorkerStatus) -> Beat:
        beat = await super().join(status)
        self.journal.worker("joined", **_identity(status))
        return beat

    async def claim(
        self, max_jobs: int, max_samples: int, version: int, adapters: Mapping[str, int] | None = None, carried: int = 0
    ) -> list[Claim]:
        claims = await super().claim(max_jobs, max_samples, version, adapters, carried)
        self.journal.attempts(_claimed(self.worker_id, one, versions=[version]) for one in claims)
        return claims

    async def checkpoint(self, pieces: Sequence[Piece]) -> list[str]:
        states = await super().checkpoint(pieces)
        self.journal.attempts(map(self._saved, pieces, states))
        return states

    def _saved(self, one: Piece, state: str) -> Record:
        made = one.partial
        told = {"start": made.start, "tokens": len(made.token_ids), "state": state}
        versions = sorted({version for version, _ in made.segments})
        return self._did("saved", one, told, sample=one.sample, versions=versions)

    async def complete(self, finished: Sequence[Finished]) -> list[str]:
        states = await super().complete(finished)
        self.journal.attempts(
            self._did("published", one, {"state": state}, sample=one.sample, versions=versions_of(one.result))
            for one, state in zip(finished, states, strict=True)
        )
        return states

    async def release(self, jobs: Sequence[Release], max_lost: int, to: str = "") -> list[str]:
        states = await super().release(jobs, max_lost, to)
        more = {"to": to} if to else {}
        self.journal.attempts(
            self._did("given back", one, {"state": state, "lost": one.lost, "pieces": len(one.pieces)} | more)
            for one, state in zip(jobs, states, strict=True)
        )
        return states

    async def bury(self, job_id: str, attempt: int, cause: str, host: str, error: str) -> bool:
        done = await super().bury(job_id, attempt, cause, host, error)
        told = {"state": _state(done), "cause": cause, "error": error[:2000]}
        self.journal.attempts([self._did("dead-lettered", Release(job_id, attempt), told)])
        return done

    async def expire(self, job_id: str, attempt: int) -> bool:
        done = await super().expire(job_id, attempt)
        self.journal.attempts([self._did("expired", Release(job_id, attempt), {"state": _state(done)})])
        return done

    def _did(self, what: str, of: Piece | Finished | Release, told: dict[str, Any], **place: Any) -> Record:
        return attempt_record(of.job_id, of.attempt, {"what": what, "worker": self.worker_id} | told, **place)

    async def leave(self) -> int:
        held = await super().leave()
        self.journal.worker("left", held=held)
        return held

    async def reap(self, *told: Any) -> tuple[int, int, int, int]:
        requeued, dead, expired, removed = counts = await super().reap(*told)
        if any(counts):
            self.journal.worker("reaped", workers=removed, requeued=requeued, dead=dead, expired=expired)
        return counts


def _folder(given: str) -> str:
    """Where a journal is, always in the same words."""
    return given.rstrip("/") if "://" in given else os.path.abspath(given)


def _identity(status: WorkerStatus) -> dict[str, Any]:
    return status.model_dump(include={"host", "pid", "model", "engine", "device", "version", "max_running"})


def _claimed(worker: str, one: Claim, **told: Any) -> Record:
    data = {"what": "claimed", "worker": worker, "queued_s": one.queued_s, "samples": one.n - len(one.published)}
    if one.partials:  # saved by earlier workers
        data["continued"] = sorted(one.partials)
    return attempt_record(one.job_id, one.attempt, data, **told)


def _held(worker: str, one: Claim, held_s: float) -> Record:
    """A claim of before the journal, as of when it was made."""
    record = _claimed(worker, one, ago_s=held_s)
    record["d"]["held_s"] = held_s
    return record


def _state(done: bool) -> str:
    return "ok" if done else "fenced"
