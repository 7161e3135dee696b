"""What is said about weights: announcements and what a version consists of."""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from .base import Message

UpdateMode = Literal["resume", "in_place", "drain"]
Transport = Literal["gloo", "nccl", "ipc", "disk"]
NonFinitePolicy = Literal["refuse", "allow"]
StagingPolicy = Literal["auto", "on", "off"]
Keep = Literal["auto", "device", "host"]
"""Where a trainer's copy of a version lives until the next one."""
BUCKET_BYTES = 512 << 20
"""Size of one broadcast, unless a setting says otherwise."""
NCCL_AGREED = ("NCCL_CUMEM_ENABLE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
"""Environment variables that must be alike in all ranks of a group, or NCCL fails to connect them. SGLang sets the
first to 0 where it is not set; engines get it back as it was, which is how most trainers have it, too."""
NCCL_CTAS = 32
"""Thread blocks of a broadcast, on each GPU, where the environment says nothing. By itself NCCL takes 24 on H200, and
copies and digests beside it cost it 1 ms in 45 then. All ranks must have the same number, too."""


class TensorSpec(BaseModel):
    """One tensor of a version and where its bytes are in the transfer.

    dtype: torch's name without the prefix ("bfloat16"). offset, nbytes: position in bucket number `bucket`.
    digest: see sync/tensors/digester.py; 16 hex digits.
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

    @property
    def fingerprint(self) -> str:
        """32 hex digits, equal for manifests of the same tensors with the same bits, wherever they are in buckets."""
        found = hashlib.blake2b(digest_size=16)
        for told in sorted((tensor.name, tensor.dtype, tensor.shape, tensor.digest) for tensor in self.tensors):
            found.update(f"{told}\n".encode())
        return found.hexdigest()


class WeightAnnouncement(Message):
    """A transfer of one version is about to happen.

    epoch: number of the transfer; one version can have several (a failed one again, late joiners).
    catch_up: for late joiners; who has the version already has no part in it.
    host, port: the sender's rendezvous store. mode: how running samples are treated.
    join_timeout_s, transfer_timeout_s: how long the sender waits for joins, and for the transfer to finish.
    nonfinite: what receivers do with a tensor that has NaN or Inf in it. verify: whether they compare digests.
    adapter: name of the LoRA adapter that `version` is one of; "" for the model's own weights. Adapters have no ranks
        and no group: every worker of the roster reads the tensors from the store, see sync/adapters/transfer.py.
    stock: set by trainers of older releases that send through SGLang's own update group. Workers refuse it by name.
    Filled in when sealed:
    roster: worker id -> rank of its first engine process in the group (the sender is rank 0), or 0 for a worker that
        takes the buffers over by CUDA IPC and is not in the group.
    world_size: ranks of the group, the sender included. group: its name; one that exists already is used again.
    """

    KIND: ClassVar[int] = 5

    version: int = Field(ge=0)
    epoch: int = Field(ge=1)
    mode: UpdateMode = "resume"
    backend: Literal["gloo", "nccl"] = "gloo"
    nonfinite: NonFinitePolicy = "refuse"
    verify: bool = True
    host: str
    port: int = Field(ge=1, le=65535)
    catch_up: bool = False
    join_timeout_s: float = Field(gt=0)
    transfer_timeout_s: float = Field(gt=0)
    roster: dict[str, int] = Field(default_factory=dict)
    world_size: int = Field(default=0, ge=0)
    group: str = Field(default="", max_length=64)
    adapter: str = Field(default="", max_length=128, pattern=r"^[A-Za-z0-9_.:/-]*$")
    stock: bool = False

    @property
    def deadline_s(self) -> float:
        """How long the transfer may take from its seal on; with "drain" what runs is finished first."""
        return self.transfer_timeout_s + (self.join_timeout_s if self.mode == "drain" else 0.0)
