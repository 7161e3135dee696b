"""One engine rank's lines: to the sender of a version, to its cell, and from those that take the version from here."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError

from ...messages.errors import MalformedMessage
from ...messages.model import as_invalid_field
from ..transfer import TransferOrder, parts_of
from .frames import Map
from .group import Group, here, open_group
from .sender_line import SenderLine
from .shelf import Offer, Shelf
from .store import join_store, local_end, why_broken


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in a cell, for one broadcast. number: of the broadcast, for `broadcast_key`.

    go: the broadcast begins at once, because all of the cell have said that they are ready.
    """

    group: Annotated[str, Field(strict=True, max_length=64)]
    number: Annotated[str, Field(strict=True, max_length=64)]
    rank: Annotated[int, Field(strict=True, ge=1)]
    world: Annotated[int, Field(strict=True, ge=2, le=1 << 16)]
    port: Annotated[int, Field(strict=True, ge=1, lt=1 << 16)]
    go: Annotated[bool, Field(strict=True)]

    @classmethod
    def of(cls, told: Map) -> Place:
        """Read the sender's answer. Raises MalformedMessage."""
        try:
            found = _PLACE.validate_python({name: told.get(name) for name in cls.__slots__})
        except ValidationError as error:
            raise MalformedMessage(f"a place in a cell cannot be read: {as_invalid_field(error)}") from None
        if found.rank >= found.world:
            raise MalformedMessage(f"a place in a cell cannot be read: rank {found.rank} of {found.world}")
        return found


_PLACE = TypeAdapter(Place)


class Lines:
    """What is kept from one transfer to the next.

    newest: the order that goes first. Waits for any other order end. group: of the cell, if this rank is in one.
    offer: what others may take from here, if anything.
    """

    def __init__(self, device: torch.device | None, rank: int, ranks: int) -> None:
        """device, rank, ranks: of the engine's tensor-parallel rank, and how many there are. None is in no cell."""
        self._device, self._rank, self._ranks = device, rank, ranks
        self.newest: TransferOrder | None = None
        self.group: Group | None = None
        self.offer: Offer | None = None
        self._as = 0  # the rank in the group
        self._sender: SenderLine | None = None
        self._store: tuple[SenderLine | None, int, Any] | None = None
        self._shelf: Shelf | None = None

    # --- the sender --------------------------------------------------------------------------------------------------

    def join(self, order: TransferOrder, deadline: float, **told: Any) -> Map:
        """Join at the order's sender. Returns its answer. Raises TransferTimeout."""
        if self._sender is None or self._sender.lost or self._sender.address != order.address:
            self.leave()
            self._sender = SenderLine(order.address)
        group = self.group.name if self.group is not None else ""
        return self._ask(
            order, deadline, "join", worker=order.worker, rank=self._rank, ranks=self._ranks, group=group,
            address=self._where(order), **told,
        )  # fmt: skip

    def source(self, order: TransferOrder, who: str, deadline: float, avoid: AbstractSet[str]) -> str:
        """Ask for the address of another source. Raises TransferTimeout."""
        told = self._ask(order, deadline, "source", who=who, avoid=sorted(avoid))
        return str(told.get("source", "")) or order.address

    def done(self, order: TransferOrder, who: str) -> None:
        """Tell the sender that all of the version is here. Raises TransferTimeout."""
        if self._sender is not None:  # else it has been left for another one
            self._sender.tell("done", token=order.token, who=who)

    def _ask(self, order: TransferOrder, deadline: float, do: str, **told: Any) -> Map:
        assert self._sender is not None
        return self._sender.ask(do, deadline, partial(self.overtaken, order), token=order.token, **told)

    def leave(self) -> None:
        """Leave the sender."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def overtaken(self, order: TransferOrder) -> str:
        """Say why this rank need not wait for a transfer any more; "" if it must."""
        return "" if self.newest is order else "another transfer goes first"

    # --- what others take from here ----------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where this rank offers its version; "" if it offers none."""
        return self._shelf.address if self._shelf is not None and self.offer is not None else ""

    def put(self, offer: Offer, order: TransferOrder) -> None:
        """Offer the version that this order has brought from others."""
        self._where(order)
        assert self._shelf is not None
        self.offer = self._shelf.put(offer)

    def withdraw(self, why: str) -> None:
        """Offer nothing more. When this returns nobody reads what was offered."""
        if self._shelf is not None:
            self._shelf.take(self.offer, why)
        self.offer = None

    def _where(self, order: TransferOrder) -> str:
        if self._shelf is None:
            to = order.address or order.holders[0]
            self._shelf = Shelf(local_end(parts_of(to)[0]))
        return self._shelf.address

    # --- the cell ----------------------------------------------------------------------------------------------------

    def store(self, order: TransferOrder, place: Place, deadline: float) -> Any:
        """Connect to the store in which the cell meets. Raises TransferTimeout if it is silent until `deadline`."""
        host = parts_of(order.address)[0]
        if self._store is None or self._store[:2] != (self._sender, place.port):  # a new line: it may be a new sender
            overtaken = partial(self.overtaken, order)
            store = join_store(host, place.port, max(0.1, deadline - time.monotonic()), overtaken)
            # A restarted sender does not know the group. A sender whose connection was lost still does.
            if self.group is not None and not store.check([here(self.group.name, self._as)]):
                self.drop_group()
            self._store = self._sender, place.port, store
        return self._store[2]

    def cell(self, order: TransferOrder, place: Place, store: Any, deadline: float) -> Group:
        """Join the cell's group, or stay in it. Raises TransferTimeout if not all are there by `deadline`."""
        assert self._device is not None
        if self.group is None or self.group.name != place.group:
            self.drop_group()
            self._as = place.rank
            self.group = open_group(
                store,
                place.group,
                rank=place.rank,
                world=place.world,
                host=parts_of(order.address)[0],
                device=self._device,
                deadline=deadline,
                broken=self.broken(order, store, place),
            )
        return self.group

    def broken(self, order: TransferOrder, store: Any = None, place: Place | None = None) -> Callable[[], str]:
        """Return a function that says why nobody need wait for the transfer any more; "" if it must."""
        if place is None:
            return partial(self.overtaken, order)
        there, sender = why_broken(store, place.number), self._sender
        return lambda: self.overtaken(order) or (sender.lost if sender is not None else "") or there()

    def drop_group(self) -> None:
        """Leave the group. This ends whatever is under way in it."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()

    def forget(self) -> None:
        """Drop group and store after a failure, which may have left them in any state."""
        self.drop_group()
        self._store = None
