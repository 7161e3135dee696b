"""One engine rank's connections to whoever sends: the last sender's rendezvous store, and the process group with it."""

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


class Wire:
    """Kept from one transfer to the next: while the members stay the same, there is nothing to set up.

    newest: the order that goes first; waits for any other's end. group: the standing one.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        """device, rank: of the engine's tensor-parallel rank."""
        self._device, self._rank = device, rank
        self.newest: TransferOrder | None = None
        self.group: Group | None = None
        self._as = 0  # the rank in it
        self._store: tuple[str, int, Any] | None = None

    def store(self, order: TransferOrder, deadline: float) -> Any:
        """The sender's store. Raises TransferTimeout if it is not there by `deadline` (time.monotonic)."""
        if self._store is None or self._store[:2] != (order.host, order.port) or lost(self._store[2]):
            overtaken = partial(self.overtaken, order)
            store = join_store(order.host, order.port, max(0.1, deadline - time.monotonic()), overtaken)
            # A restarted sender knows nothing of a group, whatever its name; one that was only lost still does.
            if self.group is not None and not store.check([here(self.group.name, self._as)]):
                self.drop_group()
            self._store = order.host, order.port, store
        return self._store[2]

    def join(self, order: TransferOrder, store: Any, deadline: float) -> Group:
        """The order's group. Raises TransferTimeout if the others are not there by then."""
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
        """The sender's store and the order's group, if both are there from the last transfer; the store is not asked
        whether that sender still is."""
        if self._store is None or self._store[:2] != (order.host, order.port) or self.group is None:
            return None
        return (self._store[2], self.group) if self.group.name == order.group else None

    def overtaken(self, order: TransferOrder) -> str:
        """Why a transfer need not be waited for any more, seen from here."""
        return "" if self.newest is order else "another transfer goes first"

    def broken(self, store: Any, order: TransferOrder) -> Callable[[], str]:
        """Asks why the transfer need not be waited for, here or at the sender; "" if it is."""
        there = why_broken(store, order.epoch)
        return lambda: self.overtaken(order) or there()

    def forget(self) -> None:
        """Both, after a failure that may have left them in any state."""
        self.drop_group()
        self._store = None

    def drop_group(self) -> None:
        """Leave it; whatever is under way in it is ended."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()
