"""What a worker says about itself with every heartbeat."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping

from ...messages.model import EXACT, WorkerState, WorkerStatus
from ..engine import Engine
from ..jobs import HeldJobs, SampleRun
from .vitals import Vitals

PACE_S, COST_S = 10.0, 60.0
"""Seconds over which a heartbeat's rate, and its share of updates, are counted."""


class Pace:
    """How fast a total grows, over the last `over_s` seconds."""

    def __init__(self, over_s: float = PACE_S) -> None:
        self._over_s = over_s
        self._seen = deque([(time.monotonic(), 0.0)])

    def per_s(self, total: float) -> float:
        """The rate, given what the total is now."""
        now = time.monotonic()
        self._seen.append((now, total))
        while self._seen[1][0] <= now - self._over_s:
            self._seen.popleft()
        since, before = self._seen[0]
        return (total - before) / max(1.0, now - since)


def slurm_job() -> dict[str, str]:
    """Which job of Slurm this process is in, and how often that was started again."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return {"slurm_job": f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"[:64]} if job else {}


class StatusReport:
    """Writes the status of one worker. refused_publishes: samples that Redis refused, because another has the job."""

    def __init__(self, host: str, engine: Engine, held: HeldJobs, vitals: Vitals, max_running: int) -> None:
        self.hold_version: int | None = None
        self.refused_publishes = 0
        self._host, self._engine, self._held, self._vitals, self._max_running = host, engine, held, vitals, max_running
        self._pace, self._cost = Pace(), Pace(COST_S)
        self._under_way: dict[str, int] = {}  # request id -> its tokens so far
        self._started_at = time.time()
        self._state, self._since = "", 0.0

    def write(
        self, worker_id: str, state: WorkerState, blocks: Mapping[str, str], warning: str, restarts: tuple[int, int]
    ) -> WorkerStatus:
        """The status of this moment. blocks: what keeps it from serving, see `EngineState.blocks`. warning: what does
        not, and somebody should know; "" for nothing. restarts: of its engine, in all and in a row."""
        info, generation = self._engine.info, self._vitals.generation
        if state != self._state:
            self._state, self._since = state, time.time()
        return WorkerStatus(
            worker_id=worker_id,
            host=self._host,
            pid=os.getpid(),
            state=state,
            version=generation.version,
            model=info.model,
            engine=f"{info.name} {info.version}",
            device=info.device,
            tp_size=info.tp_size,
            pp_size=info.pp_size,
            dp_size=info.dp_size,
            ep_size=info.ep_size,
            kv_tokens=info.kv_tokens,
            context_length=info.context_length,
            features=tuple(sorted({*info.features, EXACT})),
            max_running=min(self._max_running, generation.slots.limit),
            running=generation.running,
            held=self._held.unpublished,
            generated_tokens=generation.generated_tokens,
            tokens_per_s=round(max(0.0, self._pace.per_s(self._generated_so_far())), 1),
            finished_samples=generation.finished,
            refused_publishes=self.refused_publishes,
            unfinished_tokens=self._unfinished_tokens(),
            engine_restarts=restarts[0],
            restarts_in_a_row=restarts[1],
            staleness=tuple(self._vitals.samples.counts),
            update_share=round(min(1.0, self._cost.per_s(generation.updates.lost_s)), 3),
            started_at=self._started_at,
            startup=self._vitals.startup.seconds.copy(),
            state_since=self._since,
            **({} if self.hold_version is None else {"hold_version": self.hold_version}),
            **slurm_job(),
            blocks=tuple(blocks),
            why="; ".join(dict.fromkeys(filter(None, [*blocks.values(), warning])))[:512],
        )

    def _generated_so_far(self) -> float:
        """Tokens of the legs that have ended, and of those that run. It falls if the engine dies."""
        seen, self._under_way = self._under_way, {}
        for request_id, sample in self._vitals.generation.in_flight.running.items():
            if isinstance(sample, SampleRun):
                before = seen.get(request_id, 0)
                more = self._engine.progress(request_id, before)
                self._under_way[request_id] = before + (len(more.token_ids) if more is not None else 0)
        return self._vitals.generation.generated_tokens + sum(self._under_way.values())

    def _unfinished_tokens(self) -> int:
        samples = (sample for held in self._held for sample in held.samples.values())
        return sum(sample.known_tokens for sample in samples if isinstance(sample, SampleRun))
