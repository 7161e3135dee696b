"""Process groups of our own: addresses, the trainer's surroundings, and waits that end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from rolloutmq.messages import ConfigError, RedisUnavailable, TransferTimeout
from rolloutmq.sync.wire.group import open_group
from rolloutmq.sync.wire.store import join_store, own_address_towards, serve_store

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://localhost",
        "redis://127.0.0.2:1",
        "unix:///tmp/x.sock",
        "redis://[::1]:6379",
    ],
)
def test_loopback_is_called_by_its_number(url: str) -> None:
    assert own_address_towards(url) == "127.0.0.1"


def test_an_address_of_this_host_towards_elsewhere() -> None:
    try:
        own = own_address_towards("redis://user:secret@192.0.2.1:6379/0")
    except RedisUnavailable:
        pytest.skip("this host has no route to anywhere")
    with socket.create_server((own, 0)):
        pass


def test_a_host_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RedisUnavailable, match="no way to nowhere:6379"):
        own_address_towards("redis://user:secret@nowhere")


def broadcast(world: int, send: torch.Tensor, timeout_s: float = 60.0, ranks: int | None = None) -> list:
    store = serve_store("127.0.0.1")
    outcomes: list = [None] * world
    deadline = time.monotonic() + timeout_s

    def take_part(rank: int) -> None:
        buffer = send.clone() if rank == 0 else torch.zeros_like(send)
        try:
            mine = store if rank == 0 else join_store("127.0.0.1", store.port, timeout_s)
            group = open_group(mine, "g", rank=rank, world=world, host="127.0.0.1", device=CPU, deadline=deadline)
            group.broadcast(buffer, deadline)
            outcomes[rank] = buffer
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(world if ranks is None else ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return outcomes


def test_everybody_gets_the_bytes() -> None:
    sent = torch.arange(1000, dtype=torch.int64).to(torch.uint8)
    assert all(torch.equal(buffer, sent) for buffer in broadcast(3, sent))
    assert all(buffer.numel() == 0 for buffer in broadcast(2, torch.empty(0, dtype=torch.uint8)))


def test_a_missing_rank_costs_one_timeout() -> None:
    first, second, _ = broadcast(3, torch.zeros(4, dtype=torch.uint8), timeout_s=1.0, ranks=2)
    assert isinstance(first, TransferTimeout)
    assert isinstance(second, TransferTimeout)


def test_no_store_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(TransferTimeout, match=f"127.0.0.1:{port}"):
        join_store("127.0.0.1", port, 0.5)


LEFT_BEHIND = """
import socket, time
from datetime import timedelta
from torch.distributed import TCPStore
from rolloutmq.sync.wire.store import begin

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)  # the interpreter is being taken down, and the call comes back meanwhile

slow = Slow()
with socket.socket() as closed:
    closed.bind(("127.0.0.1", 0))
    port = closed.getsockname()[1]
begin(lambda: TCPStore("127.0.0.1", port, None, False, timedelta(seconds=0.5)))
time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_process_that_leaves_a_call_behind_ends_in_order() -> None:
    assert subprocess.run([sys.executable, "-c", LEFT_BEHIND], stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_who_comes_after_the_deadline_does_not_begin() -> None:
    with pytest.raises(TransferTimeout, match="rank 1 of 2 came too late"):
        open_group(None, "g", rank=1, world=2, host="127.0.0.1", device=CPU, deadline=time.monotonic())


def test_an_abort_ends_a_broadcast_that_waits_for_its_sender() -> None:
    store, deadline = serve_store("127.0.0.1"), time.monotonic() + 20.0
    groups: list = [None, None]
    failed: list[Exception] = []
    entered = threading.Event()

    def receive() -> None:
        try:
            entered.set()
            groups[1].broadcast(torch.zeros(8, dtype=torch.uint8), deadline)
        except TransferTimeout as error:
            failed.append(error)

    def meet(rank: int) -> None:
        mine = store if rank == 0 else join_store("127.0.0.1", store.port, 5.0)
        groups[rank] = open_group(mine, "g", rank=rank, world=2, host="127.0.0.1", device=CPU, deadline=deadline)

    meeting = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in meeting:
        thread.start()
    for thread in meeting:
        thread.join(20)
    receiving = threading.Thread(target=receive)
    receiving.start()
    assert entered.wait(5)
    groups[0].abort()  # the sender's end: a broadcast that has begun, or begins now, finds its peer gone
    receiving.join(5)
    assert not receiving.is_alive()
    assert len(failed) == 1


def test_a_backend_that_is_not_there() -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch has NCCL")
    gpu = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="nccl"):
        open_group(None, "g", rank=0, world=1, host="127.0.0.1", device=gpu, deadline=time.monotonic() + 1.0)
