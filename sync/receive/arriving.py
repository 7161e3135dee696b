"""Buckets on their way to one rank, and what is done with each as it comes.

Broadcasts are queued ahead in the first half of a transfer, as far as there are buffers. docs/architecture.md says why,
under "Nothing on the wire waits".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import Any

import torch

from ...messages.errors import TransferTimeout
from ..wire import SLICE_S, Group, Queued, await_broadcasts, check_unbroken
from .loading import Loading
from .verify import Arrival


class Arriving:
    """Broadcasts of one transfer, bucket after bucket, and the digests of what arrived.

    Not safe for several threads, but for what `watch` does.
    """

    def __init__(
        self,
        group: Group,
        views: Sequence[torch.Tensor],
        *,
        buffers: int,
        streams: tuple[Any, Any],
        arrival: Arrival | None,
        deadline: float,
        broken: Callable[[], str],
    ) -> None:
        """views: where each bucket of the manifest is received. The memory repeats after `buffers` of them.

        streams: torch.cuda.Streams, to receive on and to work on. arrival: makes the digests, if they are checked.
        deadline: of time.monotonic. broken: returns why the transfer broke off, "" if it did not.
        """
        self._group, self._views, self._buffers = group, views, buffers
        self._receiving, self._working = streams
        self._arrival, self._deadline, self._broken = arrival, deadline, broken
        self._began = 0.0
        self._queued: list[Queued] = []
        self._ahead: Any = None
        self._looked = 0
        self._settled = 0
        self._taken, self._lock = Event(), Lock()
        self._lost = ""

    @property
    def looked_at(self) -> bool:
        """Whether what arrives is digested as it comes."""
        return self._arrival is not None

    @property
    def complete(self) -> bool:
        """Whether every bucket is known to have arrived. If not, the group is of use for nothing else."""
        return self._settled == len(self._views)

    def queue_ahead(self) -> None:
        """Queue the broadcasts that there are buffers for."""
        self._put_behind()
        self._began = time.monotonic()
        for _ in range(min(self._buffers, len(self._views))):
            self._queue()
        with torch.cuda.stream(self._receiving):  # not `Work.is_completed`, which is also true of what has failed
            self._queued[-1].wait()
            self._ahead = self._receiving.record_event()

    def settle_ahead(self) -> None:
        """Digest them and wait until they are here. Raises TransferTimeout after it has aborted the group."""
        with torch.cuda.stream(self._working):
            while self._looked < len(self._queued):
                self._look(self._looked)
        await_broadcasts(self._group, self._working.record_event(), self._deadline, self._broken, self._began)
        self._settled = len(self._queued)

    def load(self, loading: Loading, *, readback: bool) -> None:
        """Load every bucket into the model. Bucket i is loaded, and read back, while later ones are on their way.

        The host waits only at the end. Raises TransferTimeout after it has aborted the group and ended what was queued.
        """
        self._put_behind()
        self._began = self._began or time.monotonic()
        free: list[Any] = [None] * self._buffers
        for index in range(len(self._views)):
            turn = index % self._buffers
            if index >= len(self._queued):
                if free[turn] is not None:
                    self._receiving.wait_event(free[turn])
                self._queue()
            with torch.cuda.stream(self._working):
                if index >= self._looked:
                    self._look(index)
                loading.load(index, beside_wire=self._others_come_beside(index))
                if readback:
                    loading.queue_readback(index, count=not self.looked_at)
                free[turn] = self._working.record_event()
        done = self._working.record_event()
        since = self._began if readback or self.looked_at else 0.0  # it is always asked where no digest would tell
        await_broadcasts(self._group, done, self._deadline, self._broken, since, alert=True)
        self._settled = len(self._queued)

    def _others_come_beside(self, index: int) -> bool:
        """Whether a bucket is on its way while this one is loaded: not here yet, and its buffer is free by then."""
        return max(index + 1, self._settled) < min(index + self._buffers, len(self._views))

    def _put_behind(self) -> None:
        """Order both streams behind the caller's, on which buffers and tables may have been made."""
        if self._views[0].is_cuda:
            for stream in (self._receiving, self._working):
                stream.wait_stream(torch.cuda.current_stream(self._views[0].device))

    def _queue(self) -> None:
        # Nothing else goes on the receiving stream: one broadcast follows the other without a gap.
        with torch.cuda.stream(self._receiving):
            self._queued.append(self._group.broadcast(self._views[len(self._queued)], self._deadline))

    def _look(self, index: int) -> None:
        """Let the current stream wait for this bucket alone, so that its load need not wait for the next bucket."""
        self._queued[index].wait()
        if self._arrival is not None:
            self._arrival.queue(index)
        self._looked = index + 1

    # --- between the halves ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Until `take`, end the broadcasts if the transfer breaks off or its time is over.

        Nothing else would end them.
        """
        Thread(target=self._watch, name="rolloutmq-arriving", daemon=True).start()

    def take(self) -> None:
        """End the watch. From here on the caller does it. Raises TransferTimeout if the broadcasts were ended."""
        with self._lock:
            self._taken.set()
        if self._lost:
            raise TransferTimeout(f"transfer broken off: {self._lost}")
        check_unbroken(self._began, self._broken)

    def abandon(self) -> None:
        """End what is on its way, if anything is. The group cannot be used any more then."""
        with self._lock:
            self._taken.set()
        if not self.complete:
            self._group.abort()

    def forget(self) -> None:
        """Forget the broadcasts, which are over: torch ends the CUDA events of each. Other threads run in between."""
        with self._lock:
            queued, self._queued = self._queued, []
        while queued:
            queued.pop()

    def _watch(self) -> None:
        while not self._taken.wait(SLICE_S):
            why = self._broken()
            if not why and len(self._queued) == len(self._views) and self._ahead.query():
                return  # all of it is here
            if not why and time.monotonic() >= self._deadline:
                why = "the time for it is over"
            if why:
                with self._lock:
                    if not self._taken.is_set():
                        self._lost = why
                        self._group.abort()
                return
