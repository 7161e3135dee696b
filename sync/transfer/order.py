"""The order of one weight transfer to an engine, and the engine's report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ...messages.errors import InvalidField, MalformedMessage
from ...messages.model import NonFinitePolicy, Transport, UpdateMode, WeightAnnouncement, as_invalid_field

SENDER_GONE = "the sender is gone"


def address_of(host: str, port: int) -> str:
    """Return "host:port", as `parts_of` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parts_of(address: str) -> tuple[str, str]:
    """Return host and port. The port of an address from elsewhere may be any text."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


"""In the report of a receiver that had no answer from the sender's store. A sender that reads it is not gone."""
_numbers = itertools.count(-1, -1)
"""Numbers of orders that are nobody's transfer: below 0, which none of the ledger has."""
Phase = Literal["rendezvous", "receive", "verify", "load", "ready", "staged", "done", "held"]


@dataclass(frozen=True, slots=True)
class VersionHolder:
    """Where a verified version is offered. address: "host:port". token: who asks there must know it."""

    version: Annotated[int, Field(ge=0)]
    address: Annotated[str, Field(min_length=1, max_length=300)]
    token: Annotated[str, Field(min_length=1, max_length=64)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Where an engine receives a weights version from.

    address: "host:port" of the sender, "" without one; holders: of others that offer the version, in which order to
    ask them. token: who asks must know it. digest: of the version's manifest. worker: who receives, as the sender
    knows it. The transfer must be over `timeout_s` seconds after the engine gets the order. With mode "drain" running
    requests have `drain_s` of them to end. path: a folder to read the version from, without anybody.
    """

    version: int
    epoch: int
    address: str
    token: str
    digest: str
    worker: str
    timeout_s: float
    holders: tuple[str, ...] = ()
    mode: UpdateMode = "resume"
    verify: bool = True
    nonfinite: NonFinitePolicy = "refuse"
    drain_s: float = 0.0
    path: str = ""

    @classmethod
    def of_announcement(cls, told: WeightAnnouncement, worker: str) -> TransferOrder:
        """Make the order that an announcement is for the engine of `worker`.

        Raises InvalidField for a transfer as older trainers announce it.
        """
        if not told.token:
            raise InvalidField("token", "", "a trainer of this release: upgrade trainer and workers together")
        return cls(
            version=told.version,
            epoch=told.epoch,
            address=address_of(told.host, told.port),
            token=told.token,
            digest=told.digest,
            worker=worker,
            timeout_s=told.deadline_s,
            drain_s=told.join_timeout_s,
            mode=told.mode,
            verify=told.verify,
            nonfinite=told.nonfinite,
        )

    @classmethod
    def from_holders(
        cls,
        trainer: VersionHolder | None,
        workers: Sequence[VersionHolder],
        digest: str,
        worker: str,
        *,
        timeout_s: float,
    ) -> TransferOrder:
        """Make an order to take a committed version from those that have it, at least one. It is nobody's transfer.

        NaN and Inf are not refused by it: a committed version has only those that its trainer allowed.
        """
        first = trainer or workers[0]
        return cls(
            version=first.version,
            epoch=next(_numbers),
            address=trainer.address if trainer is not None else "",
            token=first.token,
            digest=digest,
            worker=worker,
            timeout_s=timeout_s,
            holders=tuple(holder.address for holder in workers if holder.token == first.token),
            nonfinite="allow",
        )

    @classmethod
    def from_disk(cls, path: str, version: int, *, timeout_s: float) -> TransferOrder:
        """Make an order to read `version` from folder `path`.

        NaN and Inf are not refused by it: a snapshot has only those that its trainer allowed, and a checkpoint with
        some is refused when it is opened.
        """
        return cls(
            version=version,
            epoch=next(_numbers),
            address="",
            token="",
            digest="",
            worker="",
            timeout_s=timeout_s,
            nonfinite="allow",
            path=path,
        )

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> TransferOrder:
        """Make one from the dictionary that `dataclasses.asdict` makes of it."""
        return cls(**raw | {"holders": tuple(raw["holders"])})


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What became of a transfer, or of its first half, on one engine. Of several ranks the worst one counts.

    phase: after the first half "ready" (in the group, will receive while it loads) or "staged" (received and verified,
        not yet loaded). At the end "done". After a failure the phase in which it failed. "held": the worker keeps
        another version, and takes no part.
    intact: whether the engine's weights are a whole version: the old one, or after "done" the new one. An engine that
        is not intact must not serve.
    switched: request id -> number of tokens that the old weights sampled, after an update under running requests.
    anew: those of them of which the engine had no cache then, because they waited: the new weights compute it.
    readback: whether the engine's parameters were compared with the trainer's digests after the load.
    way: how the version came. holder: "host:port" where this engine offers it to others, "" if it does not.
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
    anew: tuple[str, ...] = ()
    way: Transport = ""
    holder: str = ""

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
