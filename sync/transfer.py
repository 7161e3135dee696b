"""One weight transfer, as told to an engine and reported back by it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from ..messages.errors import MalformedMessage

Backend = Literal["gloo", "nccl"]
Phase = Literal["rendezvous", "receive", "verify", "load", "done"]


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Where an engine receives a weights version from.

    The trainer is rank 0 of `world_size`; tensor-parallel rank r of this engine is rank `rank_offset + r`.
    `host:port` is the trainer's TCPStore, `group` a name unique to this epoch in it. The manifest (names, dtypes,
    shapes, buckets, digests) is read from that store. Everything must be over within `timeout_s` seconds.
    """

    version: int
    epoch: int
    backend: Backend
    host: str
    port: int
    group: str
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What became of a transfer on one engine (on its first failing rank, if it has several).

    phase: "done", or where it failed. Up to and including "verify" the old weights are bit-exact;
        a failure in "load" leaves them partly written (`intact` False): the engine must not serve.
    """

    ok: bool
    phase: Phase
    error: str = ""
    tensors: int = 0
    nbytes: int = 0
    receive_s: float = 0.0
    verify_s: float = 0.0
    load_s: float = 0.0

    @property
    def intact(self) -> bool:
        """Whether the weights the engine had before are still whole."""
        return self.ok or self.phase != "load"

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TransferReport:
        """Unknown fields are dropped. Raises MalformedMessage for what is no report."""
        try:
            raw = json.loads(text)
            report = cls(**{name.name: raw[name.name] for name in fields(cls) if name.name in raw})
            if not isinstance(report.ok, bool) or report.phase not in get_args(Phase):
                raise ValueError(f"ok={report.ok!r}, phase={report.phase!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MalformedMessage(f"a transfer report cannot be read: {error}") from None
        return report
