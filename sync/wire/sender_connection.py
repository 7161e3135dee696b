"""One engine rank's connections to the sender: its rendezvous store, and the process group."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..transfer import TransferOrder
from .group import Group, here, open_group
from .store import join_store, lost, why_broken

CPU = torch.device("cpu")


class SenderConnection:
    """Store and group of the last transfer. The next one uses them again if sender and members are the same.

    newest: the order that goes first. Waits for any other order end. group: the process group, if there is one.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        """device, rank: of the engine's tensor-parallel rank."""
        self._device, self._rank = device, rank
        self.newest: TransferOrder | None = None
        self.group: Group | None = None
        self._as = 0  # the rank in it
        self._store: tuple[str, int, Any] | None = None

    def store(self, order: TransferOrder, deadline: float) -> Any:
        """Connect to the sender's store. Raises TransferTimeout if it is silent until `deadline` (time.monotonic)."""
        if self._store is None or self._store[:2] != (order.host, order.port) or lost(self._store[2]):
            overtaken = partial(self.overtaken, order)
            store = join_store(order.host, order.port, max(0.1, deadline - time.monotonic()), overtaken)
            # A restarted sender does not know the group. A sender whose connection was lost still does.
            if self.group is not None and not store.check([here(self.group.name, self._as)]):
                self.drop_group()
            self._store = order.host, order.port, store
        return self._store[2]

    def join(self, order: TransferOrder, store: Any, deadline: float) -> Group:
        """Join the order's group. Raises TransferTimeout if not all members are there by `deadline`."""
        if self.group is None or self.group.name != order.group:
            self.drop_group()
            self._as = order.rank_offset + self._rank
            self.group = open_group(
                store,
                order.group,
                rank=self._as,
                world=order.world_size,
                host=order.host,
                device=self._device if order.transport == "nccl" else CPU,
                deadline=deadline,
                broken=self.broken(store, order),
            )
        return self.group

    def standing(self, order: TransferOrder) -> tuple[Any, Group] | None:
        """Return the last transfer's store and group if the order has them too. The sender may be gone by now."""
        if self._store is None or self._store[:2] != (order.host, order.port) or self.group is None:
            return None
        return (self._store[2], self.group) if self.group.name == order.group else None

    def overtaken(self, order: TransferOrder) -> str:
        """Say why this rank need not wait for a transfer any more; "" if it must."""
        return "" if self.newest is order else "another transfer goes first"

    def broken(self, store: Any, order: TransferOrder) -> Callable[[], str]:
        """Return a function that says why nobody need wait for the transfer any more, here or at the sender; or ""."""
        there = why_broken(store, order.epoch)
        return lambda: self.overtaken(order) or there()

    def forget(self) -> None:
        """Drop store and group after a failure, which may have left them in any state."""
        self.drop_group()
        self._store = None

    def drop_group(self) -> None:
        """Leave the group. This ends whatever is under way in it."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()
