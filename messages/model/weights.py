"""Announcements of weight transfers, and the manifest of a weights version."""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictInt

from .base import Float, Items, Message, Record

UpdateMode = Literal["resume", "in_place", "drain", "auto"]
Transport = Literal["pull", "nccl", "ipc", "disk", ""]
"""How a version came to an engine: bucket by bucket from others, by broadcast, from the trainer's own buffers on the
same GPU, from a folder; "" if it did not come."""
NonFinitePolicy = Literal["refuse", "allow"]
StagingPolicy = Literal["auto", "on", "off"]
Keep = Literal["auto", "device", "host"]
"""Where a trainer keeps its copy of a version until the next one."""
BUCKET_BYTES = 512 << 20
"""Size of one broadcast, unless a setting says otherwise."""
NCCL_AGREED = ("NCCL_CUMEM_ENABLE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
"""Environment variables that must be equal in all ranks of a group, or NCCL fails to connect them. SGLang sets the
first to 0 where it is not set. Engines get the original value back, which is what most trainers have too."""
NCCL_CTAS = 32
"""Thread blocks of a broadcast on each GPU, unless the environment sets them. NCCL's own choice on H200 is 24, and then
concurrent copies and digests slow it by 1 ms in 45. All ranks must have the same number."""


class TensorSpec(Record):
    """One tensor of a version, and the position of its bytes in the transfer.

    dtype: torch's name without the prefix ("bfloat16"). offset, nbytes: position in bucket number `bucket`.
    digest: 16 hex digits, see sync/tensors/digester.py.
    """

    name: str = Field(min_length=1, max_length=512)
    dtype: str = Field(max_length=32)
    shape: Items[Annotated[StrictInt, Field(ge=0)]] = Field(max_length=16)
    bucket: StrictInt = Field(ge=0)
    offset: StrictInt = Field(ge=0)
    nbytes: StrictInt = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{16}$")


class WeightManifest(Message):
    """All tensors of a version. bucket_nbytes: the size of each broadcast buffer, in order."""

    KIND: ClassVar[int] = 4

    version: StrictInt = Field(ge=0)
    bucket_nbytes: Items[Annotated[StrictInt, Field(ge=0)]]
    tensors: Items[TensorSpec] = Field(max_length=1 << 17)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def fingerprint(self) -> str:
        """32 hex digits. They are equal for manifests of the same tensors with the same bits, in any buckets."""
        found = hashlib.blake2b(digest_size=16)
        for told in sorted((tensor.name, tensor.dtype, tensor.shape, tensor.digest) for tensor in self.tensors):
            found.update(f"{told}\n".encode())
        return found.hexdigest()


class WeightAnnouncement(Message):
    """Announces the transfer of one version.

    epoch: number of the transfer. host, port: where its sender listens; see sync/wire/shelf.py. token: who asks there
    must know it. digest: of the version's manifest, see `WeightManifest.fingerprint`. mode: how running samples are
    treated. join_timeout_s, transfer_timeout_s: seconds in which workers begin, and in which the transfer ends.
    nonfinite: whether receivers refuse a tensor that contains NaN or Inf. verify: whether they compare digests.
    adapter: name of the LoRA adapter that has this version, "" for the model's own weights. awaited: whether the
    trainer waits for it: with mode "auto" workers then take it sooner. What trainers of older releases announce has
    other fields and is refused by the name of one.
    """

    KIND: ClassVar[int] = 5

    version: StrictInt = Field(ge=0)
    epoch: StrictInt = Field(ge=1)
    mode: UpdateMode = "resume"
    nonfinite: NonFinitePolicy = "refuse"
    verify: bool = True
    host: str
    port: StrictInt = Field(ge=1, le=65535)
    token: str = Field(default="", max_length=64)
    digest: str = Field(default="", max_length=64)
    join_timeout_s: Float = Field(gt=0)
    transfer_timeout_s: Float = Field(gt=0)
    adapter: str = Field(default="", max_length=128, pattern=r"^[A-Za-z0-9_.:/-]*$")
    awaited: bool = False

    @property
    def deadline_s(self) -> float:
        """Seconds that the transfer may take on a worker. With "drain" running samples finish first."""
        return self.transfer_timeout_s + (self.join_timeout_s if self.mode == "drain" else 0.0)
