"""One weight transfer, as told to an engine and reported back by it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ...messages.errors import InvalidField, MalformedMessage
from ...messages.model import NonFinitePolicy, Transport, UpdateMode, WeightAnnouncement, as_invalid_field
from .settings import STOCK_GONE

Phase = Literal["rendezvous", "receive", "verify", "load", "ready", "staged", "done"]


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Where an engine receives a weights version from.

    The trainer is rank 0 of `world_size` in process group `group`; tensor-parallel rank r of this engine is rank
    `rank_offset + r`. `host:port` is the trainer's TCPStore, which has the manifest (names, dtypes, shapes, buckets,
    digests) under the epoch's keys; see wire.EpochKeys. Everything must be over within `timeout_s` seconds of
    the moment the engine learns of it; with mode "drain" what runs has `drain_s` of them to end. transport: "nccl" and
    "gloo" are broadcasts in `group`, "ipc" opens the trainer's own buffers on the same GPU (then there is no group and
    no rank), "disk" reads the version from the snapshots in folder `path` (then there is no sender either).
    As an order to send (`Engine.send_weights`) it makes this engine rank 0, in the trainer's place.
    """

    version: int
    epoch: int
    transport: Transport
    host: str
    port: int
    group: str
    rank_offset: int
    world_size: int
    timeout_s: float
    mode: UpdateMode = "resume"
    verify: bool = True
    nonfinite: NonFinitePolicy = "refuse"
    drain_s: float = 0.0
    path: str = ""

    @classmethod
    def of_announcement(
        cls, announcement: WeightAnnouncement, rank: int, *, timeout_s: float | None = None
    ) -> TransferOrder:
        """What a sealed announcement asks of an engine whose first rank in the group is `rank`.

        rank: as in its roster; 0 for a receiver that opens the sender's buffers by IPC, and for the sender itself,
        whose order goes by the announcement's backend. timeout_s: of a sender; None is a receiver's deadline.

        Raises InvalidField for a transfer through SGLang's own update group, as older trainers announce them.
        """
        if announcement.stock:
            raise InvalidField("transfer", "stock", STOCK_GONE)
        sends = timeout_s is not None
        return cls(
            version=announcement.version,
            epoch=announcement.epoch,
            transport=announcement.backend if rank or sends else "ipc",
            host=announcement.host,
            port=announcement.port,
            group=announcement.group,
            rank_offset=rank,
            world_size=announcement.world_size,
            timeout_s=announcement.deadline_s if timeout_s is None else timeout_s,
            drain_s=announcement.join_timeout_s,
            mode=announcement.mode,
            verify=announcement.verify,
            nonfinite=announcement.nonfinite,
        )

    @classmethod
    def from_disk(cls, path: str, version: int, number: int, *, timeout_s: float) -> TransferOrder:
        """To read `version` from folder `path`: there is no sender and no group.

        number: below 0, and another one for each order: it stands for the epoch. Values that are not finite are let
        pass: a snapshot has what its trainer let pass, and a checkpoint with NaN is refused when it is opened.
        """
        return cls(
            version=version,
            epoch=number,
            transport="disk",
            host="",
            port=0,
            group="",
            rank_offset=0,
            world_size=1,
            timeout_s=timeout_s,
            nonfinite="allow",
            path=path,
        )

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> TransferOrder:
        """From `dataclasses.asdict` of one."""
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What became of a transfer, or of its first half, on one engine (its worst rank, if it has several).

    phase: "ready" (in the group, will receive while it loads) or "staged" (received and verified, not yet loaded)
        after the first half; "done" at the end; else where it failed.
    intact: whether the engine's weights are a whole version: the old one, or after "done" the new one. An engine that
        is not intact must not serve.
    switched: of an update under running requests: request id -> tokens that the old weights have sampled.
    readback: whether what the engine's parameters hold after the load was compared with the trainer's digests.
    """

    ok: bool
    phase: Phase
    error: str = ""
    intact: bool = True
    tensors: int = 0
    nbytes: int = 0
    rendezvous_s: float = 0.0
    receive_s: float = 0.0
    load_s: float = 0.0
    readback: bool = False
    switched: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TransferReport:
        """Unknown fields are dropped. Raises MalformedMessage for what is no report."""
        try:
            return _REPORT.validate_json(text, strict=True)
        except ValidationError as error:
            raise MalformedMessage(f"a transfer report cannot be read: {as_invalid_field(error)}") from None


_REPORT = TypeAdapter(TransferReport)
