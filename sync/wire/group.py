"""Process groups for weights, beside the trainer's and the engine's. docs/architecture.md says how they are made."""

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
from ...messages.model import NCCL_AGREED, NCCL_CTAS
from .quiet import quiet_torch_for_a_while
from .store import BoundedStore, begin, local_end, never, within

STUCK_AFTER_ABORT_S = 5.0
AT_ONCE_S = 0.1
ALERT_S = 0.2
MARGIN_S = 0.5
"""Seconds after the deadline that gloo gets to end by itself, before the wait for it ends."""
_NCCL_ENV = {
    # This package keeps the deadline. torch's own watchdog would end the whole process over a broken communicator.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_env_lock = Lock()


def nccl_settings() -> str:
    """Return this process's NCCL settings that all ranks of a group must share."""
    return " ".join([*(f"{name}={os.environ.get(name, '')}" for name in NCCL_AGREED), f"ctas={NCCL_CTAS}"])


class Queued(Protocol):
    """A broadcast on its way."""

    def wait(self) -> object:
        """Let the current stream wait for the broadcast before it runs what is queued next. The host does not wait."""


class _Over:
    def wait(self) -> None:
        """Do nothing: the broadcast is over."""


class Group(Protocol):
    """A process group in which rank 0 sends and the others receive."""

    name: str

    def broadcast(self, buffer: torch.Tensor, deadline: float) -> Queued:
        """Send (rank 0) or fill (others) a flat uint8 buffer.

        With NCCL it is queued behind the current stream and the broadcasts before it. Call `wait` of the result before
        using the buffer, and `await_broadcasts` to learn whether it arrived. With gloo it blocks until `deadline` (of
        time.monotonic) at most, and raises TransferTimeout, also when a peer died.
        """

    def abort(self) -> None:
        """End what is under way here. The buffer being received is half written. The group cannot be used any more."""


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
    """Join a group of `world` ranks, with NCCL if `device` is a GPU, else with gloo.

    host: an address whose route leads to the peers. gloo listens on this host's own address on that route.
    Raises TransferTimeout if the others are not there by `deadline`, or as soon as `broken()` returns a reason.
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
    """A group over TCP, through host memory."""

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
        """See Group. Dropping torch's object closes the connections, so blocked peers get an error."""
        self._group = None


class NcclGroup:
    """A group between GPUs. No call blocks longer than its deadline. The ranks must have met first; see `_meet`."""

    def __init__(self, store: Any, name: str, *, rank: int, world: int, device: torch.device, deadline: float) -> None:
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 – missing from CPU builds

        self.name = name
        self._device = device
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=30)
        options.is_high_priority_stream = True  # digests and copies fill the GPU, and broadcasts must not wait for them
        options.config.min_ctas = options.config.max_ctas = NCCL_CTAS  # environment variables override it
        with nccl_environment():
            self._group = ProcessGroupNCCL(
                PrefixStore("cuda/", PrefixStore(f"{name}/", _raw(store))), rank, world, options
            )
        try:
            _with_deadline(self._connect, deadline, self.abort, f"NCCL communicator {name}, rank {rank} of {world}")
        except RuntimeError as error:
            raise TransferTimeout(f"rank {rank} of {world} met no full group: {error}") from error

    def _connect(self) -> None:
        """Make the communicator, which the first collective does. Blocks until every rank is there."""
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
    """Return the store as torch's groups take it."""
    return store.raw if isinstance(store, BoundedStore) else store


def here(name: str, rank: int) -> str:
    """Return the key that `rank` sets in the store when it is there to make group `name`."""
    return f"{name}/here/{rank}"


def _meet(store: Any, name: str, *, rank: int, world: int, deadline: float, broken: Callable[[], str]) -> None:
    """Wait until every rank is here. The next step, making a communicator, cannot be ended from outside.

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
    """Wait until `event` (torch.cuda.Event), which was recorded behind the broadcasts, has happened.

    since: when the broadcasts were queued (time.monotonic), if not just now.
    alert: poll without a sleep at first. For a thread that everything waits for, in a process with no other busy
    thread.

    At `deadline` (time.monotonic), or as soon as `broken()` returns a reason, it aborts the group and raises
    TransferTimeout. `broken` is called ten times a second, the first time after a tenth; see `check_unbroken`.
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
            pause = min(pause * 1.2, 0.0001)  # seconds; an update takes a few milliseconds
    check_unbroken(began if since is None else since, broken)


def check_unbroken(since: float, broken: Callable[[], str]) -> None:
    """Raise TransferTimeout if `broken()` returns a reason. It is not called within AT_ONCE_S of `since`.

    NCCL's kernels end here too when the sender breaks off. Then events behind them happen although nothing arrived.
    """
    if time.monotonic() - since > AT_ONCE_S and (reason := broken()):
        raise TransferTimeout(f"transfer broken off: {reason}")


def _drain(event: Any) -> None:
    """Wait until an aborted collective, and what was queued behind it, has ended.

    Only then its buffers may be reused.
    """
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
    """Set the environment variables that ProcessGroupNCCL reads when it is made, inside this block only."""
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
