"""A live pool as the page shows it: one reader, whoever looks on, and what changed since the second before."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

from ...messages.broker import broker_of, read_jobs
from ...messages.errors import RolloutMQError
from ...messages.ids import age_s, is_id
from ...messages.model import PRIORITIES, STALENESS_BOUNDS
from ...messages.redis import PoolRedis, text, whole
from ...producer.diagnosis import Cause, reasons
from ..journal import live_of, plain, waiting_of
from ..metrics import PoolWatch, Reading
from ..scale import Decision, ScaleSettings, decide
from ..scale import History as ScaleHistory
from ..terminal import printable
from .causes import EMPTY_ROW, failed_rows, waiting_row
from .history import ages_of
from .hub import Hub, as_json, merge_patch
from .lanes import Ribbon, workers_of
from .letters import Letters
from .recent import Recent
from .verdict import Moment, frame_of

log = logging.getLogger(__name__)
EVERY_S = 1.0
CPU_SHARE, WAIT_SHARE = 20, 100
"""One part of this process' time in so many is spent on looks. A slow Redis is asked less often: after so many times as
long as one of the questions took."""
LONGEST_S = 10.0
LATE_S = 3.0
POINTS = 900
SERIES = ("at", "queued", "running", "done", "consumed", "tokens_per_s", "serving", "age_p95")
DRAWN = 32
OF_ONE_JOB: frozenset[Cause] = frozenset(
    {"task", "needs", "context", "adapter", "version-ahead", "exact-version", "staleness", "suspect", "preferred"}
)
"""What keeps jobs that ask for it. Other causes keep all that are in the queues."""
ROW_FIELDS = ("state", "client", "accepted", "owner", "attempt", "samples", "published")


class LivePool:
    """Reads a pool once a second for everybody. recent: what the trainer's journal adds, None without one.

    `run` does it until it is cancelled; `hub` has what viewers get.
    """

    def __init__(self, redis: PoolRedis, pool: str, recent: Recent | None, *, can_act: bool) -> None:
        self._redis, self._pool, self._recent, self._can_act = redis, pool, recent, can_act
        self._watch, self._broker = PoolWatch(redis, pool), broker_of(redis, pool)
        self.letters, self.ribbon = Letters(self._broker.parts), Ribbon()
        self.series: dict[str, deque[float | None]] = {name: deque(maxlen=POINTS) for name in SERIES}
        self.hub = Hub(lambda: as_json(self.state()))
        self.looks = 0
        self._scale = ScaleHistory()
        self._heard = time.monotonic()
        self._trouble = ""
        self._frame: dict[str, Any] = {}
        self._looked: tuple[Reading, Decision, dict[str, dict[str, Any]]] | None = None
        self._began = self._next = 0.0

    async def run(self) -> None:
        """Look, and tell everybody, once a second."""
        looking: asyncio.Task[None] | None = None
        try:
            while True:
                began = time.monotonic()
                if (looking is None or looking.done()) and began >= self._next:
                    looking = asyncio.create_task(self._look())
                if looking is not None:
                    await asyncio.wait([looking], timeout=EVERY_S / 2)
                self._tell()
                await asyncio.sleep(max(0.05, EVERY_S - (time.monotonic() - began)))
        finally:
            if looking is not None:
                looking.cancel()
                await asyncio.wait([looking])

    async def _look(self) -> None:
        began, busy, slow_s = time.monotonic(), time.thread_time(), 0.0
        try:
            reading, view = await self._watch.read()
            decision, self._scale = decide(view, ScaleSettings(most=1_000_000), self._scale)
            asked = time.monotonic()
            ages = await self._ages(reading)
            slow_s = time.monotonic() - asked
            await self.letters.read()
            self._looked = reading, decision, ages
            self.ribbon.take(reading.pool, reading.ended)
            self._began = self._began or reading.pool.at
            self._heard, self._trouble, self.looks = time.monotonic(), "", self.looks + 1
        except (RedisError, OSError, TimeoutError, RolloutMQError) as error:
            self._trouble = printable(str(error) or type(error).__name__)
        except Exception as error:  # one odd answer must not end the page
            log.exception("a look at the pool failed")
            self._trouble = f"{type(error).__name__}: see the dashboard's log"
        cost = max(CPU_SHARE * (time.thread_time() - busy), WAIT_SHARE * slow_s)
        self._next = began + min(LONGEST_S, max(EVERY_S, cost)) - 0.1

    async def _ages(self, reading: Reading) -> dict[str, dict[str, Any]]:
        """The contract's ages, of DRAWN jobs each at the front, in the middle and at the end of each queue."""
        drawn: list[list[float]] = [[] for _ in PRIORITIES]
        for part in self._broker.parts:
            redis: Any = part.redis
            async with redis.pipeline(transaction=False) as pipe:
                for queue, count in zip(part.keys.queues, reading.pool.load.queued, strict=True):
                    for first in (0, count // 2, -DRAWN):
                        pipe.zrange(queue, first, first + DRAWN - 1)
                answers = await pipe.execute(raise_on_error=False)
            for place, members in enumerate(answers):
                ids = {text(one) for one in members} if isinstance(members, list) else ()
                drawn[place // 3] += [age for it in ids if (age := age_s(it, reading.pool.at)) is not None]
        found = zip(PRIORITIES, drawn, reading.pool.load.queued, strict=True)
        return {name: ages_of(ages) | {"n": count} for name, ages, count in found}

    def _tell(self) -> None:
        """Work out what changed, and give it to the viewers."""
        if self._looked is not None:
            before, self._frame = self._frame, self._make_frame(*self._looked)
            points = self._points()
            for name, values in self.series.items():
                values.append(points[name])
            patch = merge_patch(before, self._frame)
            self.hub.send({"patch": patch, "points": points} | self.ribbon.changes())

    @property
    def silent_s(self) -> float:
        """Seconds for which Redis has not answered; 0 while it does, also if looks are rare because they are costly."""
        silent = time.monotonic() - self._heard
        waits = silent - max(0.0, self._next - self._heard)
        return round(silent, 1) if self._trouble or waits > LATE_S else 0.0

    def _make_frame(self, reading: Reading, decision: Decision, ages: dict[str, dict[str, Any]]) -> dict[str, Any]:
        pool, load, moment = reading.pool, reading.pool.load, self._moment(reading, decision)
        journal = (self._recent.frame if self._recent is not None else None) or {"flow": {}, "versions": {}}
        return frame_of(moment, self._frame.get("verdict")) | {
            "pool": self._pool, "mode": "live", "can_act": self._can_act, "began": self._began, "ended": None,
            "workers": dict(workers_of(pool)),
            "publishes": [list(one) for one in self.ribbon.publishes],
            "flow": {
                "queued": sum(load.queued) + load.suspects, "running": moment.running, "done": load.done,
                "consumed": journal["flow"].get("consumed"),
                "failed": load.dead + load.expired + load.cancelled, "ages": ages,
                "tokens_per_s": round(sum(one.tokens_per_s for one in pool.alive), 1),
                "trainer_waits": journal["flow"].get("trainer_waits"),
            },
            "versions": journal["versions"],
        }  # fmt: skip

    def _moment(self, reading: Reading, decision: Decision) -> Moment:
        recent = self._recent
        pool, load = reading.pool, reading.pool.load
        silent = self.silent_s
        kept = load.open_bytes + load.unread_bytes + load.letter_bytes + load.saved_bytes + load.session_bytes
        shares = {"Redis": (pool.memory, pool.memory_limit), "jobs and results": (kept, load.cap_bytes)}
        under_way = any(one.state == "updating" for one in pool.alive) and pool.transfer
        return Moment(
            at=round(pool.at + (time.monotonic() - self._heard), 1), silent_s=silent, trouble=self._trouble,
            reasons=reasons(pool), scale=(decision.state, decision.why),
            running=sum(one.running for one in pool.alive),
            syncing=pool.newest if under_way else None,
            deaths=self.ribbon.deaths, refusals=self.ribbon.refusals, restarts=self.ribbon.restarts,
            stalls=self.ribbon.stalls, failures=self.letters.groups,
            stale=self._finished_staleness() if recent is None or recent.staleness is None else recent.staleness,
            rewards={} if recent is None or recent.rewards is None else recent.rewards,
            full={kind: used / limit for kind, (used, limit) in shares.items() if limit},
        )  # fmt: skip

    def _finished_staleness(self) -> dict[int, int]:
        """Without a journal: of finished samples, as workers count them since the dashboard began."""
        bounds = (*STALENESS_BOUNDS, 2 * STALENESS_BOUNDS[-1])
        return dict(zip(bounds, map(int, self._watch.totals.staleness.counts), strict=False))

    def _points(self) -> dict[str, float | None]:
        """The newest of each series."""
        flow, workers = self._frame["flow"], self._frame["workers"].values()
        oldest = [age["p95"] for age in flow["ages"].values() if age["p95"] is not None]
        serving = sum(one["alive"] and one["state"] in {"serving", "updating"} for one in workers)
        known = not self._frame["silent_s"]
        of_flow = ("queued", "running", "done", "consumed", "tokens_per_s")
        return {
            "at": self._frame["at"], "age_p95": max(oldest, default=None), "serving": serving if known else None,
            **{name: flow[name] if known else None for name in of_flow},
        }  # fmt: skip

    def state(self, *, brief: bool = False) -> dict[str, Any]:
        """The contract's State. brief: without lanes and series."""
        if not self._frame:
            return {"at": time.time(), "pool": self._pool, "mode": "live", "can_act": self._can_act, "silent_s": 0.0}
        if brief:
            return self._frame
        lanes = {name: {"spans": it.spans, "ticks": it.ticks} for name, it in self.ribbon.lanes.items()}
        return self._frame | {"lanes": lanes, "series": {name: list(some) for name, some in self.series.items()}}

    async def requeue(self, group: str) -> dict[str, Any] | None:
        """See Letters. The next look follows at once."""
        try:
            return await self.letters.requeue(group)
        finally:
            self._next = 0.0

    async def rows(self, limit: int, before: float, worker: str, outcome: str) -> list[dict[str, Any]]:
        """Jobs that run, and dead letters, newest first. Raises RedisError."""
        found: list[dict[str, Any]] = []
        if not worker and outcome != "running":
            found += failed_rows(self.letters.failed, limit, before)["rows"]
        if outcome in {"", "running"}:
            found += [row for row in await self._running(limit, worker) if row["at"] < before]
        return sorted(found, key=lambda row: -row["at"])[:limit]

    async def waiting(self, limit: int) -> dict[str, Any]:
        """Jobs that wait, the oldest first, each with what for. Raises RedisError."""
        if self._looked is None:
            return {"rows": []}
        pool = self._looked[0].pool
        found = (f": {it.found}" for it in reasons(pool) if it.stops and it.cause not in OF_ONE_JOB)
        turn, waits = f"for its turn{next(found, '')}", await waiting_of(self._broker, limit)
        ages = {job_id: age_s(job_id, pool.at) for job_id in waits}
        rows = [
            waiting_row(job_id, pool.at - age, f"for {waits[job_id]}" if waits[job_id] else turn)
            for job_id, age in sorted(ages.items(), key=lambda it: -(it[1] or 0.0))
            if age is not None
        ][:limit]
        left = max(0, sum(pool.load.queued) + pool.load.suspects - len(rows))
        return {"rows": rows, "next": None, "left": left}

    async def _running(self, limit: int, worker: str) -> list[dict[str, Any]]:
        names = [worker] if worker else list(islice(self._frame.get("workers", {}), limit))
        rows = []
        for part in self._broker.parts:
            redis: Any = part.redis
            async with redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.sscan(part.keys.held(name), count=limit)
                held = await pipe.execute(raise_on_error=False)
            some = [page[1] for page in held if isinstance(page, list | tuple)]
            ids = list(islice((text(it) for jobs in some for it in jobs if is_id(text(it))), limit))
            for job_id, has in zip(ids, await read_jobs(redis, part.keys, ids, *ROW_FIELDS), strict=True):
                if has:
                    rows.append(_running_row(job_id, has))
        return rows

    async def rollout(self, job_id: str) -> dict[str, Any] | None:
        """What Redis has of a job: facts, and no tokens. None if it does not know it. Raises RedisError."""
        if not is_id(job_id) or (live := await live_of(self._broker, job_id)) is None:
            return None
        prompt = live.job.token_ids if live.job is not None else None
        facts = {name: str(value) for name, value in (live.facts | live.letter).items() if value is not None}
        facts |= {"state": live.state, "waits for": live.waits, "problem": live.problem}
        return {
            "job_id": job_id, "sample": 0, "samples": int(live.facts.get("samples") or 1),
            "prompt": {"ids": [] if prompt is None else prompt.tolist(), "text": None}, "tokens": [], "legs": [],
            "in_place": [], "cached_tokens": 0, "facts": {name: value for name, value in facts.items() if value},
            "notes": [], "turns": [], "verdict": None,
            "events": [{"at": live.facts.get("accepted_at", 0.0), "text": f"{live.state}; {plain(live.published)}"}],
        }  # fmt: skip


def _running_row(job_id: str, has: Mapping[str, bytes]) -> dict[str, Any]:
    published, samples, attempt = (whole(has.get(name)) for name in ("published", "samples", "attempt"))
    return EMPTY_ROW | {
        "job_id": job_id, "at": whole(has.get("accepted")) / 1000, "client": text(has.get("client", b"")),
        "worker": text(has.get("owner", b"")), "state": "running",
        "why": f"{published} of {samples} samples, attempt {attempt}",
    }  # fmt: skip
