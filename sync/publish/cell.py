"""One cell, at the sender's end: a process group that is kept from one broadcast to the next, one at a time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ...messages.errors import TransferTimeout
from ..tensors import Snapshot, Staging, short_turns
from ..wire import Group, Queued, await_broadcasts, broadcast_key, open_group, quiet_torch


class Cell:
    """Sends versions to its members. One thread at a time may call its methods, and any thread `give_up`.

    members: worker -> its first rank. turns: calls of `send` for the cell's thread; None in the end.
    """

    def __init__(
        self,
        store: Any,
        host: str,
        members: Mapping[str, int],
        world: int,
        device: torch.device,
        *,
        lost: Callable[[], str],
    ) -> None:
        """store: the sender's own rendezvous store. world: ranks of the members and the sender. device: the sender's.

        lost(): why `send` need not wait for the cell any more; "" if it must. It is called again and again.
        """
        self.store, self.host, self.members, self.world = store, host, members, world
        self.group = f"cell-{secrets.token_hex(4)}"  # a restarted trainer's are others
        self.turns: SimpleQueue[tuple[Snapshot, str, float, bool] | None] = SimpleQueue()
        self._device, self._lost = device, lost
        self._group: Group | None = None
        self._why = ""
        self._stream: Any = None
        self._staging: Staging | None = None

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def send(self, snapshot: Snapshot, number: str, deadline: float, *, ready: bool) -> None:
        """Send every bucket. Blocks. Raises TransferTimeout, also after `give_up`; the cell is of no more use then.

        number: of this broadcast, for `broadcast_key`. deadline: on time.monotonic(). ready: whether all receivers have
        their buffers.
        """
        try:
            # Engines may stand still until the last bucket, so the training loop must not keep the interpreter for
            # long.
            with quiet_torch(), short_turns():
                self._send(snapshot, number, deadline, ready=ready)
        except Exception as error:
            self.store.set(broadcast_key(number, "broken"), str(error)[:500])
            self.close()
            raise

    def give_up(self, why: str) -> None:
        """End the `send` under way. It is called from another thread."""
        self._why = self._why or why or "the transfer was given up"

    def clean(self, number: str) -> None:
        """Delete the keys of a broadcast that is over."""
        for what in ("go", *(f"ready/{rank}" for rank in range(1, self.world))):
            self.store.delete_key(broadcast_key(number, what))

    def _send(self, snapshot: Snapshot, number: str, deadline: float, *, ready: bool) -> None:
        if self._group is None:
            self._group = open_group(
                self.store,
                self.group,
                rank=0,
                world=self.world,
                host=self.host,
                device=self._device,
                deadline=deadline,
                broken=self._broken,
            )
        if not ready:
            self._await_ready(number, deadline)
        self._check()
        go = partial(self.store.set, broadcast_key(number, "go"), "1")
        if self._device.type == "cuda":
            self._send_from_gpu(self._group, snapshot, self._device, deadline, go)
            return
        go()
        for bucket in snapshot.buckets:
            self._check()
            self._group.broadcast(bucket.cpu(), deadline)

    def _send_from_gpu(
        self, group: Group, snapshot: Snapshot, device: torch.device, deadline: float, go: Callable[[], object]
    ) -> None:
        """go: tells receivers that they may overwrite the weights that they have."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        buffers: list[torch.Tensor] = []
        if snapshot.device.type == "cpu":
            self._staging = self._staging or Staging(device, "off")
            buffers = self._staging.rotating(snapshot.manifest.bucket_nbytes)
        queued: list[Queued] = []
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            for index, bucket in enumerate(snapshot.buckets):
                source = bucket
                if bucket.device.type == "cpu":
                    if index >= len(buffers):
                        queued[index - len(buffers)].wait()  # the buffer's last broadcast
                    source = buffers[index % len(buffers)][: bucket.numel()]
                    source.copy_(bucket, non_blocking=True)
                queued.append(group.broadcast(source, deadline))
                if index == 0:  # after the first broadcast is queued: everybody waits for the wire
                    go()
            for each in queued[-1:]:
                each.wait()
            await_broadcasts(group, self._stream.record_event(), deadline, self._broken)

    def _await_ready(self, number: str, deadline: float) -> None:
        """Wait until every receiver has its buffers. A broadcast that waits for a receiver would keep this GPU busy."""
        missing = [broadcast_key(number, f"ready/{rank}") for rank in range(1, self.world)]
        pause = 0.00005  # seconds; the transfer of a small model takes a few milliseconds
        while True:
            missing = [key for key in missing if not self.store.check([key])]
            if not missing:
                return
            self._check()
            if time.monotonic() >= deadline:
                raise TransferTimeout(f"{len(missing)} of {self.world - 1} receivers were not ready in time")
            time.sleep(pause)
            pause = min(pause * 1.02, 0.02)

    def _broken(self) -> str:
        return self._why or self._lost()

    def _check(self) -> None:
        if why := self._broken():
            raise TransferTimeout(f"transfer broken off: {why}")
