"""The order of one weight transfer to an engine, and the engine's report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ...messages.errors import InvalidField, MalformedMessage
from ...messages.model import NonFinitePolicy, Transport, UpdateMode, WeightAnnouncement, as_invalid_field
from .settings import STOCK_GONE

SENDER_GONE = "the sender is gone"
"""In the report of a receiver that had no answer from the sender's store. A sender that reads it is not gone."""
Phase = Literal["rendezvous", "receive", "verify", "load", "ready", "staged", "done"]


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Where an engine receives a weights version from.

    The trainer is rank 0 of `world_size` in process group `group`. Tensor-parallel rank r of this engine is rank
    `rank_offset + r`. `host:port` is the trainer's TCPStore. It has the manifest (names, dtypes, shapes, buckets,
    digests) under the epoch's keys; see `EpochKeys` in sync/wire/store.py. The transfer must be over `timeout_s`
    seconds after the engine gets the order. With mode "drain" running requests have `drain_s` of them to end.
    transport: "nccl" and "gloo" are broadcasts in `group`. "ipc" opens the trainer's own buffers on the same GPU,
    without group and rank. "disk" reads the version from the snapshots in folder `path`, without a sender. As an order
    to send (`Engine.send_weights`) it makes this engine rank 0, in the trainer's place.
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
        """Make the order that a sealed announcement is for an engine whose first rank in the group is `rank`.

        rank: as in the roster; 0 for a receiver that opens the sender's buffers by IPC. It is 0 for the sender itself
        too,
            whose transport is the announcement's backend.
        timeout_s: a sender's. None takes a receiver's deadline from the announcement.

        Raises InvalidField for a transfer through SGLang's own update group, as older trainers announce it.
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
        """Make an order to read `version` from folder `path`. It has no sender and no group.

        number: stands for the epoch. It is below 0 and differs from order to order. NaN and Inf are not refused by it:
        a snapshot has only those that its trainer allowed, and a checkpoint with some is refused when it is opened.
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
        """Make one from the dictionary that `dataclasses.asdict` makes of it."""
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What became of a transfer, or of its first half, on one engine. Of several ranks the worst one counts.

    phase: after the first half "ready" (in the group, will receive while it loads) or "staged" (received and verified,
        not yet loaded). At the end "done". After a failure the phase in which it failed.
    intact: whether the engine's weights are a whole version: the old one, or after "done" the new one. An engine that
        is not intact must not serve.
    switched: request id -> number of tokens that the old weights sampled, after an update under running requests.
    readback: whether the engine's parameters were compared with the trainer's digests after the load.
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

    @property
    def seconds(self) -> float:
        """From the rendezvous to verified parameters. What is loaded as it arrives took the same time for both."""
        received = 0.0 if self.receive_s == self.load_s else self.receive_s
        return self.rendezvous_s + received + self.load_s

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TransferReport:
        """Decode a report. Unknown fields are dropped. Raises MalformedMessage for a text that is no report."""
        try:
            return _REPORT.validate_json(text, strict=True)
        except ValidationError as error:
            raise MalformedMessage(f"a transfer report cannot be read: {as_invalid_field(error)}") from None


_REPORT = TypeAdapter(TransferReport)
