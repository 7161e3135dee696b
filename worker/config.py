"""How a worker behaves, apart from its engine."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..messages.model import Float, Int
from .spot import Cloud


class WorkerConfig(BaseModel):
    """Settings of one worker. Each field is a key of a configuration file and, by `ops.flags`, a flag of the command.

    Everything here is checked when it is built: a value out of range raises pydantic's ValidationError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    redis_url: str = Field(repr=False)
    """URL: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://."""
    pool: str = "default"
    """Name of the pool."""
    max_running: Int = Field(default=256, ge=1, le=65536)
    """Samples decoded at the same time."""
    prefetch: Int | None = Field(default=None, ge=0)
    """Most samples that wait in the engine's own queue, so that it never idles for a round trip; default:
    max-running / 8. A slow worker has fewer: no more than it can start within a second, by the rate at which its
    samples end. An idle neighbour cannot run them."""
    lease_s: Float = Field(default=10.0, ge=0.2, le=3600.0)
    """Seconds of silence after which others get this worker's jobs."""
    max_lost: Int = Field(default=3, ge=1)
    """A job is dead-lettered when its worker or engine died this often."""
    checkpoint_s: Float = Field(default=10.0, ge=0.1)
    """Seconds after which a running sample is saved again; a worker's death costs about this much."""
    drain_s: Float = Field(default=30.0, ge=0.0)
    """Seconds that running samples have to end before the rest is handed back."""
    spot: Cloud | None = None
    """Cloud (aws, gcp or azure) whose notices to heed: when this machine will be taken away, everything is handed back
    within 4 s. Default: none."""
    spot_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+/?$")
    """URL of the metadata service, if it is not http://169.254.169.254."""
    snapshots: str | None = Field(default=None, min_length=1)
    """Folder where the publisher saves versions; a worker that is behind looks there first."""
    first_weights: Literal["checkpoint", "newest"] = "checkpoint"
    """What an engine begins with: checkpoint; or newest, if the pool has a version: then it does not read its
    checkpoint, and serves when that version has come. With load_format dummy it waits for the first one, too."""
    hold_version: Int | None = Field(default=None, ge=0, lt=1 << 40)
    """Weights version that this worker takes and keeps while others go on: from a transfer, from whoever offers it, or
    from --snapshots; 0 is the checkpoint. For jobs with that exact_version. Default: the newest."""
    journal: str | None = Field(default=None, min_length=1)
    """Folder or URL (s3://…) for a journal of what this worker claims, saves, publishes and loads; several may share
    one."""
    media_hosts: frozenset[str] = frozenset()
    """Host to fetch media of jobs from; repeatable. Default: none."""
    engine_restarts: Int = Field(default=5, ge=0)
    """Restarts of the engine in a row without a finished sample, before it gives up."""

    metrics_port: Int | None = Field(default=None, ge=0, le=65535)
    """Port for Prometheus' metrics, and for the probes /live and /ready; 0 takes a free one. Default: none."""
    metrics_host: str = Field(default="0.0.0.0", min_length=1)
    """Address of that port; 127.0.0.1 for this host alone."""

    @model_validator(mode="after")
    def _has_what_it_holds(self) -> Self:
        if self.hold_version == 0 and self.first_weights == "newest":
            raise ValueError("hold_version=0: that is the checkpoint, and first_weights='newest' does not read it")
        return self

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats: a tenth of the lease, at most one."""
        return min(1.0, self.lease_s / 10)

    @property
    def capacity(self) -> int:
        """Samples that a full worker holds."""
        return self.max_running + (max(1, self.max_running // 8) if self.prefetch is None else self.prefetch)
