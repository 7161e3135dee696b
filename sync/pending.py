"""What an engine rank keeps of a transfer between its two halves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..messages.errors import TransferTimeout
from ..messages.weights import WeightManifest
from .digest import values_of
from .disk_checkpoint import Checkpoint
from .disk_read import DiskVersion
from .group import Group
from .layout import layout_of
from .rendezvous import EpochKeys
from .transfer import TransferOrder


@dataclass(slots=True)
class Pending:
    """A transfer that was prepared. staged: the buckets hold the version; else they are two to receive into.

    deadline: of time.monotonic. store: the connection to the sender's. group: None where none is needed.
    """

    order: TransferOrder
    deadline: float
    store: Any
    manifest: WeightManifest
    group: Group | None
    buckets: list[torch.Tensor]
    staged: bool
    rendezvous_s: float = 0.0
    receive_s: float = 0.0
    opened: DiskVersion | Checkpoint | None = None
    expected: torch.Tensor = field(init=False)  # (tensors,) int64: the manifest's digests
    layout: int = field(init=False)  # of the manifest; worked out here, because the commit stands in somebody's way

    def __post_init__(self) -> None:
        self.layout = layout_of(self.manifest)
        self.expected = values_of([spec.digest for spec in self.manifest.tensors], "cpu")

    def say_ready(self, rank: int) -> None:
        """Tell the sender that this rank of the engine waits for the first bucket. Raises TransferTimeout."""
        try:
            self.store.set(EpochKeys(self.order.epoch).ready(self.order.rank_offset + rank), "1")
        except RuntimeError as error:
            raise TransferTimeout(f"the sender is gone: {error}") from error
