"""How long Redis is busy with one call of each script, in a pool as large as any, when the call does all that it may.

    python -m benchmarks worst-calls --out benchmarks/results/worst-calls-cpu.json

The pool has 1,000 workers, 200,000 queued jobs and 5,000 clients, one of them with 40,000 open jobs. The calls are the
broker's own, with records as it writes them and payloads that nobody decodes. A call's time is what the slow log says,
or the processor time of the server's main thread (INFO cpu before and after it) if that is less: on a busy host the
slow log has the time of others in it. Everything is done in several rounds. `ms` is the slowest call of the best round,
and `slowest_ms` that of all rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redis import Redis

from rolloutmq.messages import encode, new_id
from rolloutmq.messages.broker import Broker, CommandSender, DeadLetters
from rolloutmq.messages.broker.broker import OVERDUE
from rolloutmq.messages.broker.lease import REAPED
from rolloutmq.messages.broker.submissions import BATCH_JOBS
from rolloutmq.messages.model import WorkerStatus
from rolloutmq.messages.redis import Keys, connect
from rolloutmq.messages.scripts import calls
from rolloutmq.messages.scripts.source import script_source
from rolloutmq.ops.operations.audit.look import ADDED_UP
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.sync.transfer import Ledger, TransferReport, VersionHolder
from rolloutmq.worker.lease.batches import MAX_BATCH
from rolloutmq.worker.lease.claims import MAX_JOBS

from .harness import Run, option

POOL = "worst"
LIMIT_MS = 20.0
NEVER = 1 << 30
SEEN = MAX_JOBS + 64  # entries of queues that a claim looks at
HOUR_MS = 3_600_000
WHERE = "10.0.0.1:29500"
HOLDER = VersionHolder(8, WHERE, "t" * 32).to_json()
Call = calls.Call


class Pool:
    """A pool on a server, and what each call of it has cost."""

    def __init__(self, url: str, size: float) -> None:
        self.url, self.size, self.keys = url, size, Keys(POOL)
        self.redis: Any = Redis.from_url(url)
        self.redis.config_set("slowlog-log-slower-than", 0)
        self.redis.config_set("slowlog-max-len", 1 << 16)
        self._loaded: dict[str, str] = {}
        self.costs: list[dict[str, list[float]]] = []
        self._claims = itertools.count(1)

    def many(self, number: int) -> int:
        """So many, or fewer in a smaller trial."""
        return max(1, int(number * self.size))

    def _command(self, call: Call) -> tuple[Any, ...]:
        if call.script not in self._loaded:
            self._loaded[call.script] = self.redis.script_load(script_source(call.script))
        return "EVALSHA", self._loaded[call.script], 1, self.keys.load, self.keys.prefix, *call.args

    def run(self, call: Call) -> Any:
        return self.redis.execute_command(*self._command(call))

    def measure(self, case: str, call: Call) -> Any:
        """Run a call and note what it cost."""
        with self.redis.pipeline(transaction=False) as pipe:
            command = self._command(call)
            pipe.slowlog_reset().info("cpu").execute_command(*command)
            pipe.info("cpu").slowlog_get(16)
            _, before, answer, after, log = pipe.execute(raise_on_error=True)
        took = max(one["duration"] for one in log if one["command"].startswith(b"EVALSHA")) / 1e3
        self._note(case, min(took, 1e3 * (_busy_s(after) - _busy_s(before))))
        return answer

    def watch(self, case: str, read: Callable[[Any], Any]) -> None:
        """Run what a client does with commands of its own, and note the slowest of them."""

        async def run() -> None:
            async with connect(self.url) as redis:
                await read(redis)

        self.redis.slowlog_reset()
        asyncio.run(run())
        took = max(one["duration"] for one in self.redis.slowlog_get(1 << 16)) / 1e3
        self._note(case, took)

    def _note(self, case: str, took: float) -> None:
        self.costs[-1].setdefault(case, []).append(took)

    def rows(self, count: int, client: str, payload: int = 600, **other: Any) -> list[calls.Submission]:
        row = calls.Submission("", b"", 1, 1, client, 0, "", "", "", "", "", b"12345678", "")._replace(**other)
        content = os.urandom(payload)
        return [row._replace(job_id=new_id(), payload=content) for _ in range(count)]

    def submit(self, rows: list[calls.Submission]) -> list[str]:
        """Have jobs accepted, in batches like the broker's."""
        size = max(1, min(512, (4 << 20) // (1 + len(rows[0].payload))))
        for start in range(0, len(rows), size):
            self.run(enqueue(rows[start : start + size]))
        return [row.job_id for row in rows]

    def join(self, worker: str, lease_ms: int = HOUR_MS, version: int = 0) -> str:
        status = WorkerStatus(worker_id=worker, host="h", pid=1, state="serving", version=version)
        self.run(calls.heartbeat(worker, lease_ms, encode(status), 1, "", 0, ""))
        return worker

    def claim(self, worker: str, jobs: int = 256, version: int = 0, *adapters: tuple[str, int]) -> Call:
        return calls.claim(worker, next(self._claims), jobs, 1 << 20, version, 3, "", *adapters)

    def held(self, worker: str, rows: list[calls.Submission]) -> list[str]:
        """Have a worker hold these jobs: the only ones of the highest class."""
        self.redis.delete(self.keys.queues[0], self.keys.later[0], self.keys.suspects)
        ids = self.submit([row._replace(priority=0) for row in rows])
        taken: set[str] = set()
        while len(taken) < len(ids):
            self.redis.hdel(self.keys.load, "owed1", "owed2")  # no other class has its turn
            # Before the jobs it is said when to ask again, and how large the share is.
            got = self.run(self.claim(worker, min(256, len(ids) - len(taken))))[2::7]
            taken |= {job_id.decode() for job_id in got}
            if not got or not taken <= set(ids):
                raise SystemExit(f"{worker} got {len(taken)} jobs, and not those {len(ids)}")
        return ids

    def tick(self) -> None:
        """Let the pool's clock pass what has been due until now."""
        for _ in range(4):
            time.sleep(0.4)
            self.run(calls.overdue(0, "", 0, ""))


def enqueue(rows: list[calls.Submission], jobs: int = 1 << 24) -> Call:
    return calls.enqueue(jobs, 1 << 40, 1 << 40, "", *rows)


def _busy_s(cpu: dict[str, float]) -> float:
    return float(cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"])


def fill(pool: Pool) -> None:
    """The population."""
    for number in range(pool.many(1000)):
        worker = pool.join(f"w{number:04d}")
        pool.held(worker, pool.rows(100, f"c{number:04d}"))
    crowd = [f"c{number:04d}" for number in range(pool.many(5000))]
    for number in range(pool.many(1000)):
        pool.redis.hset(pool.keys.holders, f"w{number:04d}", HOLDER)
    for number in range(pool.many(200_000) // 400):
        kind: dict[str, Any] = [{}, {"deadline_ms": HOUR_MS}, {"min_version": NEVER}, {"group": "g"}][number % 4]
        pool.submit(pool.rows(400, crowd[number % len(crowd)], 65536 if number % 100 == 0 else 600, **kind))
    for start in range(0, len(crowd), 256):  # some results that nobody takes, for each client
        ids = pool.held("w0000", [row for one in crowd[start : start + 256] for row in pool.rows(1, one)])
        publish(pool, "w0000", ids, 200)


def publish(pool: Pool, worker: str, ids: list[str], size: int) -> None:
    pool.run(calls.complete(worker, *finished(ids, size)))


def finished(ids: list[str], size: int, sample: int = 0) -> Iterator[tuple[str, int, int, bytes]]:
    return ((job_id, 1, sample, bytes(size)) for job_id in ids)


def pieces(ids: list[str], number: int, size: int, samples: int = 1) -> list[tuple[str, int, int, int, bytes, int]]:
    return [(it, 1, sample, number, bytes(size), 1) for it in ids for sample in range(samples)]


# --- the cases ---


def submitting(pool: Pool) -> None:
    full = {"deadline_ms": HOUR_MS, "group": "group", "adapter": "a1@1", "prefers": "2000@w0001", "min_version": 1}
    rows = pool.rows(BATCH_JOBS, "many", max_staleness=1, **full)
    pool.measure(f"enqueue: {BATCH_JOBS} jobs with every field", enqueue(rows))
    pool.measure("enqueue: the same again", enqueue(rows))
    pool.measure("enqueue: 4 MiB in 64 jobs", enqueue(rows := pool.rows(64, "many", 65536)))
    cancelled = pool.submit(pool.rows(1000, "many", priority=0))
    pool.run(calls.cancel("x", *cancelled))
    pool.measure("enqueue: behind 1,000 cancelled jobs", enqueue(pool.rows(1, "many", priority=0), jobs=10))
    pool.redis.delete(pool.keys.queues[0])
    pool.measure("enqueue: one job of 64 MiB", enqueue(large := pool.rows(1, "many", 64 << 20)))
    pool.run(calls.cancel("x", large[0].job_id))


def claiming(pool: Pool) -> None:
    worker = pool.join("claims")
    with_adapters = [(f"a{number}", 1) for number in range(64)]
    pool.measure(f"claim: {MAX_JOBS} jobs of a long queue", claim := pool.claim(worker, MAX_JOBS, 0, *with_adapters))
    pool.measure("claim: the same again", claim)
    pool.submit(pool.rows(SEEN, "many", priority=0, min_version=7))
    pool.measure(f"claim: {SEEN} jobs that need newer weights", pool.claim(worker, MAX_JOBS))
    pool.run(calls.announce(1, 7, b"", 60, "", ""))
    pool.measure("close: a version that jobs wait for", calls.close(1, 7, "committed", 60, "", HOLDER, "{}"))
    pool.measure(f"claim: {MAX_JOBS} jobs that waited for it", pool.claim(worker, MAX_JOBS, 7))
    pool.submit(pool.rows(SEEN, "many", priority=0, deadline_ms=1))
    pool.tick()
    pool.measure(f"claim: {SEEN} jobs that are overdue", pool.claim(worker, MAX_JOBS))
    other = pool.join("preferred")
    pool.submit(pool.rows(SEEN, "many", priority=0, prefers=f"3600000@{other}"))
    pool.measure(f"claim: {SEEN} jobs that prefer another worker", pool.claim(worker, MAX_JOBS))
    pool.measure(f"claim: {MAX_JOBS} jobs that prefer this worker", pool.claim(other, MAX_JOBS))
    broken = pool.submit(pool.rows(SEEN, "many", priority=0))
    for job_id in broken:
        pool.redis.hdel(pool.keys.job(job_id), "t")
    pool.measure(f"claim: {SEEN} damaged jobs", pool.claim(worker, MAX_JOBS))
    for size, n in ((16384, 1), (100, 64)):
        giver, number = pool.join(f"gives{n}"), 1 if n == 1 else 16
        ids = pool.held(giver, pool.rows(256, "many", n=n))
        for start, piece in itertools.product(range(0, 256, 4), range(number)):
            pool.run(calls.checkpoint(giver, *pieces(ids[start : start + 4], piece, size, n)))
        pool.run(calls.release(giver, 3, "", *[(job_id, 1, 0, 0) for job_id in ids]))
        pool.measure(f"claim: {MAX_JOBS} jobs with {n * number} pieces each", pool.claim(worker, MAX_JOBS))


def ending(pool: Pool) -> None:
    worker = pool.join("ends")
    ids = pool.held(worker, pool.rows(MAX_BATCH, "many"))
    pool.measure(f"complete: {MAX_BATCH} samples, 2 MiB", calls.complete(worker, *finished(ids, 16384)))
    ids = pool.held(worker, pool.rows(MAX_BATCH, "many", n=64))
    for sample in range(63):
        pool.run(calls.complete(worker, *finished(ids, 100, sample)))
    pool.measure(
        f"complete: the last samples of {MAX_BATCH} jobs of 64", calls.complete(worker, *finished(ids, 100, 63))
    )
    (one,) = pool.held(worker, pool.rows(1, "many", n=4096))
    for start in range(0, 4095, 256):
        some = [next(finished([one], 100, sample)) for sample in range(start, min(start + 256, 4095))]
        pool.run(calls.complete(worker, *some))
    some = [next(finished([one], 100, sample)) for sample in range(MAX_BATCH)]
    pool.measure(f"complete: {MAX_BATCH} samples of a job of 4,096 again", calls.complete(worker, *some))
    ids = pool.held(worker, pool.rows(256, "many", n=2))
    for piece in range(512):
        pool.run(calls.checkpoint(worker, *pieces(ids, piece, 100, 1)))
    pool.measure(
        f"checkpoint: {MAX_BATCH} pieces, 2 MiB", calls.checkpoint(worker, *pieces(ids[:MAX_BATCH], 512, 16384))
    )
    pool.measure("checkpoint: 8 samples of 512 pieces anew", calls.checkpoint(worker, *pieces(ids[:8], 0, 16384)))
    pool.measure(
        f"complete: {MAX_BATCH} samples with 512 pieces", calls.complete(worker, *finished(ids[-MAX_BATCH:], 100))
    )
    ids = pool.held(worker, pool.rows(256, "many", n=2))
    for piece in range(512):
        pool.run(calls.checkpoint(worker, *pieces(ids, piece, 100, 1)))
    pool.measure("cancel: 256 jobs with 512 pieces", calls.cancel("x", *ids))
    ids = pool.held(worker, pool.rows(256, "many"))
    given = [(job_id, 1, 0, 1, 0, 0, bytes(16384)) for job_id in ids[:MAX_BATCH]]
    pool.measure(f"release: {MAX_BATCH} jobs with 2 MiB", calls.release(worker, 3, "", *given))
    ids = pool.held(worker, pool.rows(BATCH_JOBS, "many", 4096))
    pool.measure(f"cancel: {BATCH_JOBS} running jobs", calls.cancel("x", *ids))
    ids = pool.held(worker, pool.rows(BATCH_JOBS // 2, "many"))
    queued = pool.submit(pool.rows(BATCH_JOBS // 2, "many", min_version=NEVER))
    pool.measure(f"stop: {BATCH_JOBS} jobs", calls.stop("x", *ids, *queued))
    ids = pool.held(worker, pool.rows(1024, "slow"))
    publish(pool, worker, ids, 4096)
    entries = pool.redis.xrange(pool.keys.reply("slow"))
    taken = [(entry_id, 64 + 4096) for entry_id, _ in entries[:BATCH_JOBS]]
    pool.measure(f"ack: {BATCH_JOBS} results", calls.ack("slow", "", *taken))
    pool.submit(pool.rows(pool.many(40_000), "big", deadline_ms=HOUR_MS))
    cursor = b"0"
    while cursor is not None:
        answer = pool.measure(
            "cancel_client: 40,000 jobs", calls.cancel_client("big", "", "x", int(cursor), BATCH_JOBS)
        )
        cursor = None if answer[0] == b"0" else answer[0]
    pool.submit(pool.rows(pool.many(100_000), "late", deadline_ms=1))
    pool.tick()
    for _ in range(16):
        pool.measure(f"overdue: {OVERDUE} of 100,000 jobs", calls.overdue(OVERDUE, "", 0, "c0001"))
    while pool.run(calls.overdue(256, "", 0, ""))[0]:
        pass


def dying(pool: Pool) -> None:
    def dead(worker: str, rows: list[calls.Submission]) -> None:
        pool.held(pool.join(worker, HOUR_MS), rows)
        pool.redis.zadd(pool.keys.workers, {worker: 0})

    def reap(case: str, max_lost: int = 3) -> None:
        while pool.measure(case, calls.reap(max_lost, REAPED, "", 0))[4]:
            pass

    dead("dies", pool.rows(1024, "many"))
    reap("reap: a worker with 1,024 jobs")
    for number in range(256):
        dead(f"idle{number}", pool.rows(1, "many"))
        pool.redis.delete(pool.keys.held(f"idle{number}"))
    reap("reap: 256 workers")
    for number in range(2):
        pool.join(f"liked{number}")
        for priority in range(3):
            pool.redis.hset(pool.keys.worker(f"liked{number}"), "number", 5000 + number)
            for row in pool.submit(pool.rows(1024, "many", priority=priority)):
                pool.redis.zadd(pool.keys.later[priority], {row: -5000 - number})
                pool.redis.zadd(pool.keys.prefers, {row: 1 << 50})
        pool.redis.zadd(pool.keys.workers, {f"liked{number}": 0})
    reap("reap: workers that 3,072 jobs prefer")
    for _ in range(40):
        dead("poison", pool.rows(256, "many", 10))
        reap("reap: 256 jobs for the last time", 1)
    pool.redis.hset(pool.keys.load, "cap", 4 << 20)
    dead("poison", pool.rows(256, "many", 3500))
    reap("reap: 256 letters that push out 10,000", 1)
    pool.redis.hset(pool.keys.load, "cap", 4 << 30)
    dead("poison", pool.rows(64, "many", 4 << 20))
    reap("reap: 64 jobs of 4 MiB for the last time", 1)
    pool.watch("a page of 64 dead letters of 4 MiB", lambda redis: DeadLetters(Broker(redis, POOL)).page())
    pool.measure("drop_letter", calls.drop_letter(pool.redis.xrevrange(pool.keys.dead, count=1)[0][0]))
    pool.measure("leave", calls.leave(pool.join("leaves")))


def syncing(pool: Pool) -> None:
    workers = [worker.decode() for worker in pool.redis.zrange(pool.keys.workers, 0, -1)]
    pool.measure("announce", calls.announce(2, 8, bytes(512), 60, "a" * 700, "a" * 32))
    said = TransferReport(True, "done", holder=WHERE).to_json()
    for worker in workers:
        pool.measure("report", calls.report(2, worker, said, 1, 8, 60, "d" * 32, HOLDER))
    lost = json.dumps(dict.fromkeys(workers, "was lost: its connection is closed"))
    pool.measure("close: with 1,000 reports, and 1,000 lost", calls.close(2, 8, "committed", 60, "", HOLDER, lost))
    pool.measure("heartbeat", calls.heartbeat(workers[0], HOUR_MS, bytes(4096), 0, "", 0, ""))
    pool.measure("command: to 1,000 workers", calls.command(command := new_id(), "", bytes(4096), 60_000))
    for worker in workers[: pool.many(256)]:
        pool.measure("answer_command: 1 MiB", calls.answer_command(command, worker, bytes(1 << 20), 600, 1 << 30))

    async def answers(redis: Any) -> None:
        sender = CommandSender(redis, POOL)
        sent = await sender.send("pause", timeout_s=3)
        for worker in sent.workers[: pool.many(256)]:
            await redis.hset(pool.keys.answers(sent.command.id), worker, bytes(1 << 20))
        await sender.answers(sent)

    pool.watch("answers of 256 workers, 1 MiB each", answers)
    pool.watch("epoch with 1,000 reports", lambda redis: redis.hgetall(pool.keys.epoch(2)))
    pool.watch("holders: some of 1,000", lambda redis: Ledger(redis, POOL).holders(8))


def looking(pool: Pool) -> None:
    queued = random.Random(0).sample(pool.redis.zrange(pool.keys.queues[1], 0, -1), 256)
    size = max(1, min(256, 200_000 // (1 + pool.redis.zcard(pool.keys.queues[1]))))
    pool.measure("audit_jobs: searching the queues", calls.audit_jobs(1, *queued[:size]))
    pool.measure("audit_jobs: 256 jobs", calls.audit_jobs(0, *queued))
    clients = [key[len(pool.keys.prefix) + 7 :] for key in pool.redis.scan_iter(pool.keys.client("*"), count=4096)]
    pool.measure("audit_totals: all clients", calls.audit_totals(ADDED_UP, *clients))
    small = [client for client in clients if pool.redis.scard(pool.keys.client(client.decode())) <= 100][:10]
    pool.measure("audit_totals: 1,000 jobs", calls.audit_totals(ADDED_UP, *small))
    pool.watch("broker.load", lambda redis: Broker(redis, POOL).load())
    pool.watch("broker.workers", lambda redis: Broker(redis, POOL).workers())
    pool.watch("broker.unread", lambda redis: Broker(redis, POOL).unread())
    pool.watch("broker.open_jobs", lambda redis: Broker(redis, POOL).open_jobs("late"))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to do."""

    size: float = option(1.0, "Of the population, for a trial.", min=0.001, max=1.0)
    rounds: int = option(3, "The best one counts.", min=1)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """How long Redis is busy with one call of each script that does all that it may, in a pool as large as any."""
    with EmbeddedRedis() as server:
        pool = Pool(server.url, plan.size)
        fill(pool)
        queued = sum(pool.redis.zcard(key) for key in pool.keys.queues) + sum(map(pool.redis.zcard, pool.keys.later))
        memory = pool.redis.info("memory")["used_memory"] / 1e9
        run.say(f"{queued} jobs queued, {memory:.1f} GB")
        for _ in range(plan.rounds):
            pool.costs.append({})
            for cases in (submitting, claiming, ending, dying, syncing, looking):
                cases(pool)
    rows: dict[str, dict[str, float]] = {}
    for case in pool.costs[0]:
        slowest = [max(costs[case]) for costs in pool.costs]
        called = sum(len(costs[case]) for costs in pool.costs)
        rows[case] = {"calls": called, "ms": round(min(slowest), 2), "slowest_ms": round(max(slowest), 2)}
    for case, row in sorted(rows.items(), key=lambda item: -item[1]["ms"]):
        run.say("!" if row["ms"] > LIMIT_MS else " ", f"{case}:", **row)
    return {"limit_ms": LIMIT_MS, "queued": queued, "memory_gb": round(memory, 2), "cases": rows}
