"""What a scenario works with: its own Redis, its own dice, processes, clients, and at the end the oracle."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from support.pools.pool import eventually

from rolloutmq import GenerateJob, RolloutClient, SamplingParams
from rolloutmq.messages import Broker, Lease, connect
from rolloutmq.messages.broker import broker_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis

from . import aof, journal, ledger
from .baseline import Rest, judge_rest, look
from .habits import Options
from .host import HostRedis
from .looks import HasId
from .oracle import Terms, Verdict, judge
from .processes import BlockingProcess, ClientProcess, Spoken, TrainerProcess, WorkerProcess
from .proxy import Proxy

POOL = "chaos"
VOCAB = 1000
EPOCH_MS = 1_700_000_000_000


class Chaos:
    """One scenario's world. Random choices come from `rng` alone, which the seed and the scenario's name determine.

    lease_s: of every worker here. recovered_s: how long it took, where that has a meaning; `budget_s` is what it may.
    servers: one for each shard, the pool's home first. logs: the directory of each one's append-only file.
    struck: the place of the server that a scenario breaks, `redis`. The seed decides.
    notes: more figures for out/chaos.json. minutes: how long a scenario that `lasts` goes on.
    """

    def __init__(
        self,
        name: str,
        seed: str,
        directory: Path,
        *,
        lease_s: float,
        config: dict[str, str] | None = None,
        bent: bool = False,
        shards: int = 1,
    ) -> None:
        self.name, self.directory, self.lease_s = name, directory, lease_s
        self.rng = random.Random(f"{seed}:{name}")
        self.struck = random.Random(f"{seed}:{name}:struck").randrange(shards)
        places = [directory, *(directory / f"shard-{shard}" for shard in range(1, shards))]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        self.logs = [place / "redis" for place in places]
        server = HostRedis if bent else EmbeddedRedis
        settings = aof.SETTINGS | (config or {})
        self.servers: list[EmbeddedRedis] = [
            server(appendonly=True, directory=log, config=settings) for log in self.logs
        ]
        self.terms = Terms()
        self.verdict = Verdict()
        self.workers: list[WorkerProcess] = []
        self.clients: list[Spoken] = []
        self.notes: dict[str, Any] = {}
        self.minutes = 0.0
        self.prompts: dict[str, list[int]] = {}
        self.recovered_s: float | None = None
        self.budget_s: float | None = None
        self.events: list[ledger.Event] = []
        self.received: list[journal.Received] = []
        self.journal = journal.Journal(directory / "journal", "driver")
        self._stack = AsyncExitStack()
        self._ids = 0
        self._deaths: list[tuple[str, int]] = []
        self._before: Rest = Rest({}, {})

    @property
    def url(self) -> str:
        """Of the pool, with all of its shards."""
        return ",".join(server.url for server in self.servers)

    @property
    def redis(self) -> EmbeddedRedis:
        """The server that the scenario breaks: the only one, or one of the shards'."""
        return self.servers[self.struck]

    # --- making things ---------------------------------------------------------------------------------------------

    def job(self, tokens: int = 20, prompt: int | None = None, **fields: Any) -> GenerateJob:
        """A job whose id, prompt and length come from this scenario's dice. tokens: what one sample generates."""
        self._ids += 1
        length = prompt or self.rng.randint(1, 40)
        made: dict[str, Any] = {
            "id": _job_id(self._ids, self.rng),
            "token_ids": [self.rng.randrange(VOCAB // 2) for _ in range(length)],
            "sampling": SamplingParams(max_new_tokens=tokens),
        }
        job = GenerateJob(**(made | fields))
        if job.token_ids is not None:
            self.prompts[job.id] = job.token_ids.tolist()
        return job

    def jobs(self, count: int, **fields: Any) -> list[GenerateJob]:
        return [self.job(**fields) for _ in range(count)]

    async def worker(self, url: str | None = None, **options: Any) -> WorkerProcess:
        """A worker process that has joined. Fields of Options; those of WorkerConfig go to its `config`."""
        return (await self.start_workers(1, url, **options))[0]

    async def start_workers(self, count: int, url: str | None = None, **options: Any) -> list[WorkerProcess]:
        """Several alike, started at the same time."""
        habits = {name: options.pop(name) for name in list(options) if name in Options.__dataclass_fields__}
        config = {"pool": POOL, "lease_s": self.lease_s, "drain_s": 5.0} | options
        started = []
        for _ in range(count):
            log = self.directory / f"worker-{len(self.workers)}.log"
            process = await WorkerProcess.launch(url or self.url, log, Options(config=config, **habits))
            self.workers.append(process)
            started.append(process)
        for process in started:
            await process.joined()
        return started

    @asynccontextmanager
    async def client(
        self, url: str | None = None, client_id: str = "trainer", patience: float = 30.0, **more: Any
    ) -> AsyncIterator[Trainer]:
        """A client in this process whose submissions and outcomes are written down. patience: the longest it waits."""
        async with RolloutClient(url or self.url, POOL, client_id=client_id, **more) as client:
            yield Trainer(client, self.journal, patience)

    async def client_process(
        self,
        jobs: Sequence[GenerateJob],
        client_id: str,
        run: str,
        options: Options | None = None,
        url: str | None = None,
    ) -> ClientProcess:
        """A client in a process of its own, under way. run: its name in the journal, another one each time."""
        file = self._jobs_file(jobs, run)
        where = (url or self.url, client_id, str(file), str(self.directory / "journal"), run)
        process = await ClientProcess.launch(self.directory / f"client-{run}.log", *where, options=options)
        self.clients.append(process)
        return process

    async def blocking_process(self, jobs: Sequence[GenerateJob], client_id: str) -> BlockingProcess:
        """A plain loop with the blocking client, in a process of its own."""
        file = self._jobs_file(jobs, client_id)
        where = (self.url, client_id, str(file), str(self.directory / "journal"), client_id)
        process = await BlockingProcess.start("blocking_process", self.directory / f"client-{client_id}.log", *where)
        self.clients.append(process)
        return process

    async def trainer_process(self, checkpoint: Path, run: str, saves: int, url: str) -> TrainerProcess:
        """A trainer with a feed that goes on from the checkpoint. saves: how often it makes another one."""
        where = (url, "trainer", str(checkpoint), str(self.directory / "journal"), run, str(saves))
        process = await TrainerProcess.start("trainer_process", self.directory / f"trainer-{run}.log", *where)
        self.clients.append(process)
        return process

    def _jobs_file(self, jobs: Sequence[GenerateJob], name: str) -> Path:
        file = self.directory / f"jobs-{name}.jsonl"
        file.write_text("\n".join(_plain(job) for job in jobs))
        return file

    async def proxy(self) -> Proxy:
        """In front of this scenario's servers, until its end."""
        return await self._stack.enter_async_context(Proxy(*(server.port for server in self.servers)))

    def ends_with(self, end: Callable[[], None]) -> None:
        """Something to stop when the scenario is over."""
        self._stack.callback(end)

    @property
    def host(self) -> HostRedis:
        """The server that is broken, in a scenario that is `bent`."""
        assert isinstance(self.redis, HostRedis)
        return self.redis

    @asynccontextmanager
    async def broker(self, url: str | None = None) -> AsyncIterator[Broker]:
        """For looking at the pool from outside."""
        async with connect(url or self.url, pool=POOL) as redis:
            yield broker_of(redis, POOL)

    # --- judging ---------------------------------------------------------------------------------------------------

    def expect(self, holds: Any, text: str) -> None:
        """Something this scenario promises beyond the oracle's rules."""
        if not holds:
            self.verdict.complain("scenario", text)

    async def died(self, *workers: WorkerProcess) -> None:
        """Kill these now; the time until their jobs are queued again is `recovered_s`."""
        self.gone(*workers)
        await asyncio.gather(*(worker.kill() for worker in workers))

    def gone(self, *workers: HasId) -> None:
        """These stop answering now, whatever way: `recovered_s` counts from here."""
        self._deaths += [(worker.id, now_ms()) for worker in workers]

    async def __aenter__(self) -> Chaos:
        for server in self.servers:
            server.start()
            self._stack.callback(server.stop)
        async with self.broker() as broker:
            self._before = await look(broker.redis, broker.keys.prefix, broker.keys.prefix)
        return self

    async def finish(self) -> None:
        """Drain to rest, read the log, ask the oracle."""
        codes = await asyncio.gather(*(worker.drain(20) for worker in self.workers))
        fine = all(worker.may_end(code) for worker, code in zip(self.workers, codes, strict=True))
        self.expect(fine, f"exit codes of the workers: {codes}")
        await self._rest()
        for server in self.servers:
            server.stop()

    async def _rest(self) -> None:
        shards: list[tuple[Rest, list[ledger.Event]]] = []
        async with self.broker() as broker:
            for part, folder in zip(broker.parts, self.logs, strict=True):
                await reap(part)
                prefix = part.keys.prefix
                after = await look(part.redis, prefix, broker.keys.prefix)
                events = ledger.tell(aof.read_commands(folder), prefix, round(self.lease_s * 1000))
                if shard := part.keys.shard:  # two servers may give the same id to two entries
                    events = [replace(it, shard=shard, entry=f"{it.entry} in shard {shard}") for it in events]
                shards.append((after, events))
        self.events = [event for _, events in shards for event in events]
        submitted, self.received = journal.read(self.directory / "journal")
        violations = self.verdict.violations
        self.verdict = judge(self.events, submitted, self.received, self.terms)
        self.verdict.violations[:0] = violations
        for after, events in shards:
            judge_rest(self._before, after, events, self.verdict, self.terms)
        self._measure([events for _, events in shards])

    def _measure(self, shards: Sequence[list[ledger.Event]]) -> None:
        for (worker, at_ms), events in product(self._deaths, shards):
            again = back_ms(events, worker, at_ms)
            self.recovered_s = max(self.recovered_s or 0.0, (again - at_ms) / 1000) if again else self.recovered_s
            self.budget_s = self.lease_s + 1
        if self.recovered_s is not None and self.budget_s is not None:
            self.expect(
                self.recovered_s <= self.budget_s,
                f"recovered after {self.recovered_s:.2f} s, allowed are {self.budget_s:.2f} s (lease {self.lease_s} s)",
            )

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.workers, *self.clients):
            await process.kill()
        self.journal.close()
        await self._stack.aclose()


class Trainer:
    """A client, with a journal of what it was promised and what it got."""

    def __init__(self, client: RolloutClient, book: journal.Journal, timeout: float = 30.0) -> None:
        self.client, self._book, self._timeout = client, book, timeout
        self._outcomes: AsyncGenerator[Any, None] | None = None

    async def submit(self, jobs: Sequence[GenerateJob]) -> None:
        """All of these are accepted when it returns."""
        await self.client.submit_many(jobs)
        self.accepted(jobs)

    def accepted(self, jobs: Iterable[GenerateJob]) -> None:
        """Write down that `submit` returned for these."""
        for job in jobs:
            self._book.submitted(job, self.client.client_id)

    def received(self, outcomes: Iterable[Any]) -> None:
        """Write down what a call of the client returned."""
        for outcome in outcomes:
            self._book.received(outcome, self.client.client_id)

    async def take(self, count: int | None = None) -> list[Any]:
        """Outcomes as they come, until nothing is outstanding or `count` have been taken.

        One loop over all calls: the last outcome of a call is acknowledged when the next one comes back for more.
        """
        taken: list[Any] = []
        while count is None or len(taken) < count:
            if self._outcomes is None:
                self._outcomes = cast("AsyncGenerator[Any, None]", self.client.results(self._timeout))
            try:
                outcome = await anext(self._outcomes)
            except StopAsyncIteration:
                self._outcomes = None
                break
            self._book.received(outcome, self.client.client_id)
            taken.append(outcome)
        return taken

    async def take_at_least(self, count: int) -> list[Any]:
        """The same, for a trainer whose submissions are still going on: nothing outstanding is not the end."""
        taken: list[Any] = []
        async with asyncio.timeout(self._timeout):
            while len(taken) < count:
                taken += await self.take(count - len(taken))
                await asyncio.sleep(0.005)
        return taken


def now_ms() -> int:
    """This host's clock, which is the server's too."""
    return int(time.time() * 1000)


def asking(url: str, option: str) -> str:
    """The pool's URL with an option, which every server's part of it has to name."""
    return ",".join(f"{one}?{option}" for one in url.split(","))


async def until(condition: Callable[[], Any], timeout: float = 15.0, what: str = "") -> Any:
    """`eventually`, under the name that reads well here."""
    return await eventually(condition, timeout, what)


async def reap(broker: Broker) -> None:
    """What the next worker's heartbeat would do about workers that are gone: wait for their leases to end, clean up."""
    janitor = Lease(broker.redis, POOL, "janitor", shard=broker.keys.shard)

    async def clean() -> bool:
        await janitor.reap(max_lost=1000)
        return not await broker.redis.exists(broker.keys.workers)

    await eventually(clean, 20.0, "the leases of dead workers to end")


def back_ms(events: Iterable[ledger.Event], worker: str, at_ms: int) -> int | None:
    """When the last of the jobs that `worker` held at `at_ms` was queued again or had ended; None if it held none.

    A job that is queued waits for a worker that has room, and nobody promises when that is.

    events: of one shard. There a worker that has lost its lease comes back under its name: what it claims then is new.
    An event's time is that of the next write that has one, so this may be too late by a heartbeat, never too early.
    """
    held: set[str] = set()
    lost = False
    last: int | None = None
    for event in events:
        lost = lost or (event.kind == "lost" and event.worker == worker)
        if event.kind == "claim" and event.worker == worker and not lost:
            held.add(event.job)
        elif event.job in held and event.kind in {"requeue", "claim", "terminal"}:
            held.discard(event.job)
            last = event.at_ms if event.at_ms > at_ms else last
    return last


def _plain(job: GenerateJob) -> str:
    fields = job.model_dump(exclude_unset=True)
    assert job.token_ids is not None
    return json.dumps(fields | {"token_ids": job.token_ids.tolist(), "sampling": job.sampling.model_dump()})


def _job_id(number: int, rng: random.Random) -> str:
    value = (EPOCH_MS + number) << 80 | rng.getrandbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return f"{value & ~(0x3 << 62) | 0x2 << 62:032x}"
