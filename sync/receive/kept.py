"""What one engine rank has worked out for a layout of buckets, and uses again as long as versions lie alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..plan import CopyPlan
from .layout import Arrival, Loading, Model, bucket_views, plan_for
from .pending import Pending


class Kept:
    """For the buffers, the layout and the model that were seen last."""

    def __init__(self, known: Collection[str]) -> None:
        """known: the names in the engine's checkpoint, as far as that can be told."""
        self._known = frozenset(known)
        self._arrived: tuple[Any, Arrival] | None = None
        self._loading: tuple[Arrival, Model, Loading] | None = None
        self._plan: tuple[Any, CopyPlan | None] | None = None

    def arrival(self, pending: Pending) -> Arrival:
        """Checks of what arrives in these buffers."""
        key = pending.told.layout, tuple(bucket.data_ptr() for bucket in pending.buckets)
        if self._arrived is None or self._arrived[0] != key:
            self._arrived = key, Arrival(pending.outline, bucket_views(pending.outline, pending.buckets))
        return self._arrived[1]

    def knows(self, pending: Pending, model: Model) -> bool:
        """Whether there is nothing to work out any more."""
        return self._loading is not None and self._loading[:2] == (self.arrival(pending), model)

    def compares_all(self, pending: Pending) -> bool:
        """Whether these buffers were loaded before, and every tensor of them compared in the parameters then."""
        loading = self._loading
        return loading is not None and loading[0] is self.arrival(pending) and loading[2].compares_all

    def loading(self, pending: Pending, model: Model) -> Loading:
        """From these buffers into the model. Raises what `plan_for` raises."""
        arrival = self.arrival(pending)
        if self._loading is None or not self.knows(pending, model):
            self._loading = arrival, model, Loading(model, self.plan(pending, model), arrival)
        return self._loading[2]

    def plan(self, pending: Pending, model: Model) -> CopyPlan | None:
        """See `plan_for`; and raises what it raises."""
        key = pending.told.layout, id(model)
        if self._plan is None or self._plan[0] != key:
            before = self._plan is not None and self._plan[1] is not None
            self._plan = key, plan_for(model, pending.outline, self._known, must=before)
        return self._plan[1]

    @property
    def last_plan(self) -> CopyPlan | None:
        """The one that was asked for last, if there was one to be had."""
        return self._plan[1] if self._plan is not None else None

    def drop_loading(self) -> None:
        """Half of its work may still be queued."""
        self._loading = None

    def drop_buffers(self) -> None:
        """Let go of the buffers."""
        self._arrived = self._loading = None
