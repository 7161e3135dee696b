"""How a trainer's weights are published: one record for the publisher, the sender and every transfer."""

from __future__ import annotations

from typing import Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from ...messages.model import BUCKET_BYTES, Keep, NonFinitePolicy, UpdateMode, as_invalid_field

STOCK_GONE = (
    "'own'; updates no longer go through SGLang's own update group: where NCCL does not work, publish with "
    "gpu_direct=False, which sends over gloo"
)
"""What is allowed where transfer='stock' was asked for."""
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
    transfer: Literal["own"]
    snapshot_every: int
    keep_snapshots: int


class SyncSettings(BaseModel):
    """Settings of a `WeightPublisher`; the same keys stand below `publisher` in a configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)

    host: str | None = Field(default=None, min_length=1)
    """This host as workers reach it; by default the address that the route to Redis leaves from."""
    port: int = Field(default=0, ge=0, le=HIGHEST_PORT)
    """Where the rendezvous store listens; 0 picks a free port."""
    mode: UpdateMode = "resume"
    """'resume' interrupts running samples and continues them under the new weights, 'in_place' changes the weights
    under them and keeps their KV cache, 'drain' lets them finish first."""
    join_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds that workers have to answer an announcement; with 'drain', to finish what runs."""
    transfer_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that a transfer may take from the seal to the last report."""
    bucket_bytes: int = Field(default=BUCKET_BYTES, ge=1)
    """Bytes of one broadcast."""
    keep: Keep = "auto"
    """Where the copy of a version lives until the next one: 'device' (as much GPU memory as the weights), 'host'
    (pinned memory), or 'auto' (the device while 10% of its memory stay free)."""
    dtype: Dtype | None = None
    """Floats are rounded to this dtype before they are digested and sent; None sends them as they are. A worker refuses
    a tensor that its engine would have to convert with a loss, unless float32 becomes bfloat16."""
    nonfinite: NonFinitePolicy = "refuse"
    """'refuse' sends no version with NaN or Inf in it, and no worker loads one; 'allow' does."""
    gpu_direct: bool = True
    """False sends through host memory (gloo), even between GPUs."""
    verify: bool = True
    """False leaves the digests unchecked, to measure what checking costs."""
    transfer: Literal["own"] = "own"
    """'own' is the only one."""
    snapshots: str | None = Field(default=None, min_length=1)
    """Folder where committed versions are saved in the background, for workers that come when this trainer is gone, and
    for a trainer that starts again."""
    snapshot_every: int = Field(default=1, ge=1)
    """The first committed version is saved, and then every one at this distance."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Newest versions that stay in the folder."""

    @field_validator("transfer", mode="before")
    @classmethod
    def _own(cls, value: object) -> object:
        if value != "own":
            raise PydanticCustomError("transfer", STOCK_GONE)
        return value

    @classmethod
    def build(cls, **given: Any) -> Self:
        """Checked settings. Raises InvalidField, which names field, value and what is allowed."""
        try:
            return cls(**given)
        except ValidationError as error:
            raise as_invalid_field(error) from None

    def announced(self) -> dict[str, Any]:
        """The fields of a WeightAnnouncement that come from here."""
        return self.model_dump(include=ANNOUNCED)
