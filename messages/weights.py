"""What is said about weights: announcements and what a version consists of."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from .base import Message

UpdateMode = Literal["resume", "in_place", "drain"]


class TensorSpec(BaseModel):
    """One tensor of a version and where its bytes are in the transfer.

    dtype: torch's name without the prefix ("bfloat16"). offset, nbytes: position in bucket number `bucket`.
    digest: see sync/digest.py; 16 hex digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=512)
    dtype: str = Field(max_length=32)
    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(max_length=16)
    bucket: int = Field(ge=0)
    offset: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{16}$")


class WeightManifest(Message):
    """Everything a receiver must end up with. bucket_nbytes: size of each broadcast buffer, in order."""

    KIND: ClassVar[int] = 4

    version: int = Field(ge=0)
    bucket_nbytes: tuple[Annotated[int, Field(ge=0)], ...]
    tensors: tuple[TensorSpec, ...] = Field(max_length=1 << 17)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, padding not counted."""
        return sum(tensor.nbytes for tensor in self.tensors)


class WeightAnnouncement(Message):
    """A transfer of one version is about to happen.

    epoch: number of the transfer; one version can have several (a failed one again, late joiners).
    catch_up: for late joiners; who has the version already has no part in it.
    host, port: the trainer's rendezvous store. mode: how running samples are treated.
    join_timeout_s, transfer_timeout_s: how long the trainer waits for joins, and for the transfer to finish.
    roster: filled in when sealed: worker id -> rank of its first engine process (the trainer is rank 0).
    world_size: filled in when sealed, trainer included.
    """

    KIND: ClassVar[int] = 5

    version: int = Field(ge=0)
    epoch: int = Field(ge=1)
    mode: UpdateMode = "resume"
    backend: Literal["gloo", "nccl"] = "gloo"
    host: str
    port: int = Field(ge=1, le=65535)
    catch_up: bool = False
    join_timeout_s: float = Field(gt=0)
    transfer_timeout_s: float = Field(gt=0)
    roster: dict[str, int] = Field(default_factory=dict)
    world_size: int = Field(default=0, ge=0)
