"""Process groups of our own: one per transfer, beside whatever groups the trainer and the engine already have.

Built directly from a TCPStore, never through `init_process_group`: the default group, its settings and its environment
are the trainer's and the engine's business, and torchrun's variables must not turn rank 0 into a store client.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from ..messages.errors import ConfigError, RedisUnavailable, TransferTimeout
from .transfer import Backend


def own_address_towards(url: str) -> str:
    """The IP address of this host that whoever serves `url` (a Redis URL) would see.

    A worker that reaches the same Redis reaches the trainer under it too, but for unusual networks: give the address
    by hand there. "127.0.0.1" for a Redis on this host or on a unix socket. Raises RedisUnavailable for a host that is
    unknown or that no route leads to.
    """
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme == "unix":
        return "127.0.0.1"
    port = parts.port or 6379
    try:
        family, kind, proto, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent, the route alone is asked for
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise RedisUnavailable(f"no way to {parts.hostname}:{port}: {error}") from error
    return "127.0.0.1" if ipaddress.ip_address(own).is_loopback else own


def serve_store(host: str, port: int = 0) -> Any:
    """The trainer's rendezvous store, listening on `port` (0: a free one, then `store.port`). Serves every epoch."""
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=30)
    )


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """A connection to the trainer's store. Raises TransferTimeout if it is not there in time."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, OSError) as error:
        raise TransferTimeout(f"no rendezvous store at {host}:{port} within {timeout_s:.1f} s: {error}") from error


class Group:
    """One transfer's process group; rank 0 sends, the others receive. All its waits together end by `timeout_s`."""

    def __init__(
        self, store: Any, name: str, *, backend: Backend, rank: int, world: int, host: str, timeout_s: float
    ) -> None:
        """host: an address whose route leads to the peers; gloo listens on this host's end of it.

        Raises TransferTimeout if the others do not come, ConfigError for a backend that is not available.
        """
        if backend != "gloo":
            raise ConfigError(f"backend={backend!r}: 'gloo' is what this transfer supports")
        self._deadline = time.monotonic() + timeout_s
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=_local_end(host))]
        try:
            self._group = ProcessGroupGloo(PrefixStore(f"{name}/", store), rank, world, options)
        except RuntimeError as error:
            raise TransferTimeout(
                f"rank {rank} of {world} met no full group within {timeout_s:.1f} s: {error}"
            ) from error

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send (rank 0) or fill (others) a flat uint8 buffer. Raises TransferTimeout, also when a peer died."""
        if buffer.numel() == 0:
            return
        try:
            left = max(0.001, self._deadline - time.monotonic())
            self._group.broadcast(buffer, 0).wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise TransferTimeout(f"broadcast of {buffer.numel()} bytes broke off: {error}") from error


def _local_end(host: str) -> str:
    return own_address_towards(f"tcp://[{host}]:1" if ":" in host else f"tcp://{host}:1")
