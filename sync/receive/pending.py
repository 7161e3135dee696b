"""What an engine rank keeps of a transfer between its two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...messages.errors import TransferTimeout
from ...messages.model import WeightManifest
from ..disk import DiskVersion
from ..disk.checkpoint import Checkpoint
from ..transfer import Phase, TransferOrder, TransferReport
from ..wire import EpochKeys, Group, Told
from .arriving import Arriving


@dataclass(slots=True)
class Pending:
    """A transfer that was prepared. staged: the buckets hold the version; else they are a few to receive into.

    deadline: of time.monotonic. store: the connection to the sender's. group: None where none is needed. arriving: what
    is on its way over NCCL already.
    """

    order: TransferOrder
    deadline: float
    store: Any
    told: Told
    group: Group | None
    buckets: list[torch.Tensor]
    staged: bool
    arriving: Arriving | None = None
    rendezvous_s: float = 0.0
    receive_s: float = 0.0
    opened: DiskVersion | Checkpoint | None = None

    @property
    def outline(self) -> WeightManifest:
        """How it lies; the digests in it may be another version's."""
        return self.told.outline

    def report(self, phase: Phase, **times: Any) -> TransferReport:
        """That it went well as far as that."""
        return TransferReport(
            ok=True,
            phase=phase,
            tensors=len(self.outline.tensors),
            nbytes=self.told.nbytes,
            rendezvous_s=self.rendezvous_s,
            **times,
        )


def say_ready(store: Any, order: TransferOrder, rank: int) -> None:
    """Tell the sender that this rank of the engine waits for the first bucket. Raises TransferTimeout."""
    try:
        store.set(EpochKeys(order.epoch).ready(order.rank_offset + rank), "1")
    except RuntimeError as error:
        raise TransferTimeout(f"the sender is gone: {error}") from error
