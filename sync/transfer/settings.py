"""How a trainer's weights are published: one record for the publisher, the sender and every transfer."""

from __future__ import annotations

from typing import Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...messages.model import BUCKET_BYTES, Keep, NonFinitePolicy, UpdateMode, as_invalid_field

ANNOUNCED = {"mode", "join_timeout_s", "transfer_timeout_s", "verify", "nonfinite"}
"""Settings that receivers are told in the announcement."""
HIGHEST_PORT = 65535
Dtype = Literal["float32", "bfloat16", "float16"]


class SyncOptions(TypedDict, total=False):
    """Keyword arguments of `WeightPublisher` that are fields of `SyncSettings`, which describes them."""

    host: str | None
    port: int
    mode: UpdateMode
    join_timeout_s: float
    transfer_timeout_s: float
    bucket_bytes: int
    keep: Keep
    dtype: Dtype | None
    nonfinite: NonFinitePolicy
    gpu_direct: bool
    verify: bool
    snapshot_every: int
    keep_snapshots: int


class SyncSettings(BaseModel):
    """Settings of a `WeightPublisher`. The section `publisher` of a configuration file has the same keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)

    host: str | None = Field(default=None, min_length=1)
    """Address under which workers reach this host; by default the local address of the route to Redis."""
    port: int = Field(default=0, ge=0, le=HIGHEST_PORT)
    """Where the trainer listens for workers; 0 picks a free port."""
    mode: UpdateMode = "auto"
    """What an update does with running samples. 'resume' interrupts them and continues them under the new weights.
    'in_place' changes the weights under them and keeps their KV cache. 'drain' lets them finish first. 'auto' is one of
    the first two for each worker and version: in place where computing the caches anew would cost too much."""
    join_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds that workers have to answer an announcement; with 'drain', to finish what runs."""
    transfer_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that a transfer may take on a worker, from the announcement to its report."""
    bucket_bytes: int = Field(default=BUCKET_BYTES, ge=1)
    """Bytes of one broadcast."""
    keep: Keep = "auto"
    """Where the copy of a version lives until the next one: 'device' (as much GPU memory as the weights), 'host'
    (pinned memory), or 'auto' (the device while 10% of its memory stay free)."""
    dtype: Dtype | None = None
    """Floats are rounded to this dtype before they are digested and sent; None sends them as they are. A worker refuses
    a tensor that its engine would have to convert with a loss, unless float32 becomes bfloat16."""
    nonfinite: NonFinitePolicy = "refuse"
    """'refuse': a version with NaN or Inf is neither sent nor loaded. 'allow': it is."""
    gpu_direct: bool = True
    """False sends over TCP through host memory, even between GPUs: no broadcasts, no CUDA IPC."""
    verify: bool = True
    """False leaves the digests unchecked. It is for measuring what the check costs."""
    snapshots: str | None = Field(default=None, min_length=1)
    """Folder where committed versions are saved in the background. Workers read them when this trainer is gone, and a
    trainer that starts again may."""
    snapshot_every: int = Field(default=1, ge=1)
    """1 saves every committed version, n the first one and then each nth."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Number of newest versions that stay in the folder."""

    @classmethod
    def build(cls, **given: Any) -> Self:
        """Make settings. Raises InvalidField, which names field, value and what is allowed."""
        try:
            return cls(**given)
        except ValidationError as error:
            raise as_invalid_field(error) from None

    def announced(self) -> dict[str, Any]:
        """Return the fields of a WeightAnnouncement that are settings."""
        return self.model_dump(include=ANNOUNCED)
