"""A worker's status, and the dead letter of a job that no worker could run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictInt

from .base import Float, Items, Message, Record

WorkerState = Literal["starting", "syncing", "serving", "updating", "paused", "draining", "quarantined"]


STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16)
BLOCKS = ("pause", "asleep", "stale", "quarantine", "dead", "version", "unavailable")
"""pause, asleep: by command. stale: its weights are asleep or were, and none have come since. quarantine: its weights
are no whole version. dead: its engine is. version: it is yet to get the pool's version, and unavailable: it has found
nobody who gives it that."""


class WorkerStatus(Message):
    """A worker as of its last heartbeat.

    version: the weights version that it serves. running: samples in the engine. held: samples of the jobs it holds.
    generated_tokens, finished_samples, refused_publishes: totals since the worker joined.
    tokens_per_s: generated over the last 10 s, those of running samples too, as far as the engine reports them.
    unfinished_tokens: what its unfinished samples have generated, as of their last save. If it leaves, others compute
    the KV cache of these tokens again.
    staleness: finished samples by how many versions their oldest token was behind the pool's newest when they ended.
    One count for each of STALENESS_BOUNDS, for at most so many, and one for more.
    kv_tokens: size of its engine's KV cache, in tokens; 0 if the engine does not say. context_length: most tokens of
    prompt and output together; 0 from workers that do not say.
    features: optional features of jobs that its engine honours, see GenerateJob.unsupported.
    started_at: Unix seconds by the worker's clock. Only people read it, no decision depends on it.
    update_share: share of the last minute that updates of the weights cost, 0 to 1.
    startup: seconds of each phase of its first start, see docs/operator.md.
    blocks: what keeps it from serving, by the names in BLOCKS or newer ones; none while it serves. why: who or what
    that is, for people; or, while it serves, what it warns of all the same.
    restarts_in_a_row: restarts of the engine since it last finished a sample.
    state_since: Unix seconds by the worker's clock at which it came into this state.
    hold_version: the weights version that it keeps, None for one that follows the pool's.
    slurm_job: Slurm's job and how often that was started again, "17.0"; "" elsewhere.
    """

    KIND: ClassVar[int] = 6

    worker_id: str
    host: str
    pid: StrictInt
    state: WorkerState
    version: StrictInt = Field(ge=0)
    model: str = ""
    engine: str = ""
    device: str = ""
    tp_size: StrictInt = Field(default=1, ge=1)
    pp_size: StrictInt = Field(default=1, ge=1)
    dp_size: StrictInt = Field(default=1, ge=1)
    ep_size: StrictInt = Field(default=1, ge=1)
    kv_tokens: StrictInt = Field(default=0, ge=0)
    context_length: StrictInt = Field(default=0, ge=0)
    features: Items[Annotated[str, Field(max_length=64)]] = Field(default=(), max_length=128)
    max_running: StrictInt = Field(default=1, ge=1)
    running: StrictInt = Field(default=0, ge=0)
    held: StrictInt = Field(default=0, ge=0)
    generated_tokens: StrictInt = Field(default=0, ge=0)
    tokens_per_s: Float = Field(default=0.0, ge=0)
    finished_samples: StrictInt = Field(default=0, ge=0)
    refused_publishes: StrictInt = Field(default=0, ge=0)
    unfinished_tokens: StrictInt = Field(default=0, ge=0)
    engine_restarts: StrictInt = Field(default=0, ge=0)
    started_at: Float = 0.0
    staleness: Items[Annotated[StrictInt, Field(ge=0)]] = Field(default=(), max_length=16)
    update_share: Float = Field(default=0.0, ge=0, le=1)
    startup: dict[Annotated[str, Field(max_length=32)], Annotated[Float, Field(ge=0)]] = Field(
        default_factory=dict, max_length=16
    )
    blocks: Items[Annotated[str, Field(max_length=32)]] = Field(default=(), max_length=16)
    why: str = Field(default="", max_length=512)
    restarts_in_a_row: StrictInt = Field(default=0, ge=0)
    state_since: Float = 0.0
    hold_version: StrictInt | None = Field(default=None, ge=0)
    slurm_job: str = Field(default="", max_length=64)

    def behind(self, committed: int) -> int:
        """How many versions it has yet to get; 0 for one that keeps its version."""
        return max(0, (committed if self.hold_version is None else self.hold_version) - self.version)


class DeadLetter(Record):
    """A job that was given up, with the reason and with the payload that can be submitted again.

    payload: the encoded job. It may be impossible to decode, which may be the reason. dropped: its bytes if it was too
    large to be kept; then payload is empty.
    at: Unix seconds by Redis' clock.
    """

    entry_id: str
    job_id: str
    cause: str
    error: str
    host: str
    attempts: StrictInt
    at: Float
    payload: bytes
    dropped: StrictInt = 0
