"""Process groups of our own, beside the trainer's and the engine's. docs/architecture.md says how they are made."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from ...messages.errors import ConfigError, TransferTimeout
from ...messages.model import NCCL_CTAS
from .quiet import quiet_torch_for_a_while
from .store import BoundedStore, begin, local_end, never, within

STUCK_AFTER_ABORT_S = 5.0
AT_ONCE_S = 0.1
ALERT_S = 0.2
MARGIN_S = 0.5
"""For gloo to keep its own deadline, before it is left alone with it."""
_NCCL_ENV = {
    # The deadline is ours. torch's own watchdog would take the whole process down with a broken communicator.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_env_lock = Lock()


class Queued(Protocol):
    """A broadcast on its way."""

    def wait(self) -> object:
        """Nothing queued on the current stream from now on runs before the broadcast is over; the host goes on."""


class _Over:
    def wait(self) -> None:
        """It is over."""


class Group(Protocol):
    """Rank 0 sends, the others receive."""

    name: str

    def broadcast(self, buffer: torch.Tensor, deadline: float) -> Queued:
        """Send (rank 0) or fill (others) a flat uint8 buffer.

        With NCCL it is queued behind the current stream and the broadcasts before it; `wait` of what is returned lets
        the then current stream wait for it, and `await_broadcasts` tells whether it came. With gloo it blocks up to
        `deadline` (of time.monotonic) and raises TransferTimeout, also when a peer died.
        """

    def abort(self) -> None:
        """End what is under way here. What was being received is half written. The group cannot be used any more."""


def open_group(
    store: Any,
    name: str,
    *,
    rank: int,
    world: int,
    host: str,
    device: torch.device,
    deadline: float,
    broken: Callable[[], str] = never,
) -> Group:
    """Join a group of `world` ranks; NCCL if `device` is a GPU, else gloo.

    host: an address whose route leads to the peers; gloo listens on this host's end of it.
    Raises TransferTimeout if the others are not there by `deadline`, or as soon as `broken()` gives a reason.
    """
    if deadline <= time.monotonic():
        raise TransferTimeout(f"rank {rank} of {world} came too late for group {name}")
    if device.type == "cuda" and not torch.distributed.is_nccl_available():
        raise ConfigError("backend='nccl': this PyTorch has no NCCL; allowed: 'gloo'")
    _meet(store, name, rank=rank, world=world, deadline=deadline, broken=broken)
    if device.type == "cuda":
        return NcclGroup(store, name, rank=rank, world=world, device=device, deadline=deadline)
    return GlooGroup(store, name, rank=rank, world=world, host=host, deadline=deadline)


class GlooGroup:
    """Over TCP, through host memory."""

    def __init__(self, store: Any, name: str, *, rank: int, world: int, host: str, deadline: float) -> None:
        self.name = name
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        options._devices = [ProcessGroupGloo.create_device(hostname=local_end(host))]
        meet = partial(ProcessGroupGloo, PrefixStore(f"{name}/", _raw(store)), rank, world, options)
        try:
            self._group: Any = within(deadline - time.monotonic() + MARGIN_S, meet)
        except (RuntimeError, TimeoutError) as error:
            raise TransferTimeout(f"rank {rank} of {world} met no full group in time: {error}") from error

    def broadcast(self, buffer: torch.Tensor, deadline: float) -> Queued:
        if buffer.numel() == 0:
            return _Over()
        if self._group is None:
            raise TransferTimeout(f"broadcast of {buffer.numel()} bytes in a group that was aborted")
        try:
            left = max(0.001, deadline - time.monotonic())
            self._group.broadcast(buffer, 0).wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise TransferTimeout(f"broadcast of {buffer.numel()} bytes broke off: {error}") from error
        return _Over()

    def abort(self) -> None:
        """See Group. Blocked peers find their connections closed: what closes them is the end of torch's object."""
        self._group = None


class NcclGroup:
    """Between GPUs. No call blocks longer than its deadline. The ranks must have met: see `_meet`."""

    def __init__(self, store: Any, name: str, *, rank: int, world: int, device: torch.device, deadline: float) -> None:
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 – missing from CPU builds

        self.name = name
        self._device = device
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=30)
        options.is_high_priority_stream = True  # digests and copies fill the GPU; the wire must not wait for them
        options.config.min_ctas = options.config.max_ctas = NCCL_CTAS  # the environment goes before it
        with nccl_environment():
            self._group = ProcessGroupNCCL(
                PrefixStore("cuda/", PrefixStore(f"{name}/", _raw(store))), rank, world, options
            )
        try:
            _with_deadline(self._connect, deadline, self.abort, f"NCCL communicator {name}, rank {rank} of {world}")
        except RuntimeError as error:
            raise TransferTimeout(f"rank {rank} of {world} met no full group: {error}") from error

    def _connect(self) -> None:
        """The first collective makes the communicator, and blocks until everybody is there."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            probe = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._broadcast(probe).wait()
            torch.cuda.current_stream().synchronize()

    def _broadcast(self, buffer: torch.Tensor) -> Any:
        from torch.distributed import BroadcastOptions  # noqa: PLC0415

        options = BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        return self._group.broadcast([buffer], options)

    def broadcast(self, buffer: torch.Tensor, deadline: float) -> Queued:
        if buffer.numel() == 0:
            return _Over()
        try:
            queued: Queued = self._broadcast(buffer)
        except RuntimeError as error:
            raise TransferTimeout(f"broadcast of {buffer.numel()} bytes could not be queued: {error}") from error
        return queued

    def abort(self) -> None:
        quiet_torch_for_a_while()
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def _raw(store: Any) -> Any:
    """What torch can build on."""
    return store.raw if isinstance(store, BoundedStore) else store


def here(name: str, rank: int) -> str:
    """Key in the store under which `rank` tells that it is there to make group `name`."""
    return f"{name}/here/{rank}"


def _meet(store: Any, name: str, *, rank: int, world: int, deadline: float, broken: Callable[[], str]) -> None:
    """Wait until every rank is here, because nobody can end what comes next (making a communicator) from outside.

    Raises TransferTimeout, which names the ranks that are missing.
    """
    keys = [here(name, other) for other in range(world)]
    pause, look = 0.0002, time.monotonic() + 0.1
    try:
        store.set(keys[rank], "1")
        while not store.check(keys):
            now, reason = time.monotonic(), ""
            if now >= look:
                look, reason = now + 0.1, broken()
            if now >= deadline:
                reason = "the time is over"
            if reason:
                late = [other for other, key in enumerate(keys) if not store.check([key])]
                raise TransferTimeout(f"rank {rank} of {world} met no full group, {late} did not come: {reason}")
            time.sleep(pause)
            pause = min(pause * 1.2, 0.02)
    except RuntimeError as error:
        raise TransferTimeout(f"rank {rank} of {world} lost the sender's store: {error}") from error


def await_broadcasts(
    group: Group,
    event: Any,
    deadline: float,
    broken: Callable[[], str],
    since: float | None = None,
    *,
    alert: bool = False,
) -> None:
    """Wait until `event` (torch.cuda.Event) has happened. since: when what it is behind was queued, if not just now.
    alert: without a sleep, at first: for a thread that holds everything up, in a process where nobody wants its turn.

    Raises TransferTimeout, after the group was aborted, at `deadline` (time.monotonic) or as soon as `broken()` gives a
    reason. It is asked ten times a second, and only once the wait has lasted that long; see `check_unbroken`.
    """
    began = time.monotonic()
    pause, look = 0.00005, began + 0.1
    while not event.query():
        now = time.monotonic()
        reason = ""
        if now >= look:
            look = now + 0.1
            reason = broken()
        if now >= deadline:
            reason = "no answer from a peer in time"
        if reason:
            group.abort()
            _drain(event)
            raise TransferTimeout(f"transfer broken off: {reason}")
        if not alert or now - began > ALERT_S:
            time.sleep(pause)
            pause = min(pause * 1.2, 0.0001)  # an update is a few milliseconds
    check_unbroken(began if since is None else since, broken)


def check_unbroken(since: float, broken: Callable[[], str]) -> None:
    """A sender that breaks off ends NCCL's kernels here, too: events happen, and nothing has come. Raises
    TransferTimeout if that may be so of what was queued at `since`; within AT_ONCE_S nobody asks."""
    if time.monotonic() - since > AT_ONCE_S and (reason := broken()):
        raise TransferTimeout(f"transfer broken off: {reason}")


def _drain(event: Any) -> None:
    """An aborted collective ends by itself; what was queued behind it must not run on while its buffers are reused."""
    until = time.monotonic() + STUCK_AFTER_ABORT_S
    while not event.query():
        if time.monotonic() >= until:
            raise RuntimeError("the GPU does not come back from an aborted broadcast")
        time.sleep(0.002)


def _with_deadline(work: Callable[[], None], deadline: float, abort: Callable[[], None], what: str) -> None:
    """Run `work` in a thread; at `deadline` call `abort` and raise TransferTimeout."""
    working = begin(work)
    wait({working}, max(0.0, deadline - time.monotonic()))
    if not working.done():
        wait({begin(abort)}, STUCK_AFTER_ABORT_S)
        wait({working}, STUCK_AFTER_ABORT_S)
        raise TransferTimeout(f"{what}: not everybody came in time")
    working.result()


@contextlib.contextmanager
def nccl_environment() -> Iterator[None]:
    """What ProcessGroupNCCL reads when it is made, for this one only."""
    with _env_lock:
        before = {name: os.environ.get(name) for name in _NCCL_ENV}
        os.environ.update(_NCCL_ENV)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
