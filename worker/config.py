"""How a worker behaves, apart from its engine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WorkerConfig(BaseModel):
    """Settings of one worker.

    max_running: samples in the engine at once.
    prefetch: samples that wait in the engine's own queue, so that it never idles for a round trip; None is an eighth
        of max_running. What is prefetched here cannot run on an idle neighbour.
    lease_s: how long the pool waits for a silent worker before it gives its jobs to others.
    max_lost: a job whose worker or engine died this often is dead-lettered.
    checkpoint_s: how often a running sample is saved; a worker's death costs at most about this much of its generation.
    drain_s: what SIGTERM leaves to running samples before the rest is handed back.
    snapshots: folder in which the pool's publisher saves versions: a worker that is behind looks there first.
    media_hosts: where this worker may fetch media of jobs from; from nowhere unless hosts are named.
    peer_after_s: when nobody has answered workers that are behind for so long, this one sends them what it serves; None
        for never.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str
    pool: str = "default"
    max_running: int = Field(default=256, ge=1, le=65536)
    prefetch: int | None = Field(default=None, ge=0)
    lease_s: float = Field(default=10.0, ge=0.2, le=3600.0)
    max_lost: int = Field(default=3, ge=1)
    checkpoint_s: float = Field(default=10.0, ge=0.1)
    drain_s: float = Field(default=30.0, ge=0.0)
    snapshots: str | None = Field(default=None, min_length=1)
    media_hosts: frozenset[str] = frozenset()
    peer_after_s: float | None = Field(default=3.0, ge=0.0)
    engine_restarts: int = Field(default=5, ge=0, description="restarts in a row without a finished sample")

    @property
    def beat_s(self) -> float:
        """Between heartbeats: ten to a lease, at most a second apart."""
        return min(1.0, self.lease_s / 10)

    @property
    def capacity(self) -> int:
        """Samples a worker holds when it is full."""
        return self.max_running + (max(1, self.max_running // 8) if self.prefetch is None else self.prefetch)
