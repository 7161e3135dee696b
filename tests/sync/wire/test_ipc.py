"""Handles of another process's buckets, as far as that can be told without a GPU."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest
import torch
from support.peers.peers import line, version

from rolloutmq.messages.errors import MalformedMessage
from rolloutmq.sync.publish import hub
from rolloutmq.sync.transfer import TransferOrder
from rolloutmq.sync.wire.ipc import export_handles, open_handles
from rolloutmq.sync.wire.lines import Lines

CPU = torch.device("cpu")
SHARED = [0, b"handle", 64, 0, b"counter", 0, b"event", True]


@pytest.mark.parametrize(
    ("handles", "why"),
    [
        ([[SHARED, 0, 65]], "65 bytes where the manifest has 64"),
        ([[SHARED[:-1], 0, 64]], "64 bytes"),
        ([[SHARED, 0, 64]] * 2, "argument"),
        ([], "argument"),
        ([[SHARED, 0]], "unpack"),
        (5, "iterate|iterable|argument"),
        ([[5, 0, 64]], "len"),
    ],
)
def test_what_are_no_handles_is_refused(handles: Any, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        open_handles(msgpack.packb(handles), CPU, [64])


@pytest.mark.parametrize("raw", [b"", b"\xc1", msgpack.packb([[SHARED, 0, 64]])[:-3], b"\xdd\xff\xff\xff\xff"])
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedMessage, match="CUDA IPC handles cannot be read"):
        open_handles(raw, CPU, [64])


def test_handles_are_opened_as_they_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, asked = torch.arange(64, dtype=torch.uint8), []

    def opened(*args: Any) -> torch.UntypedStorage:
        asked.append(args)
        return memory.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    [bucket] = open_handles(msgpack.packb([[SHARED, 16, 48]]), CPU, [48])
    assert asked == [tuple(SHARED)]
    assert torch.equal(bucket, memory[16:])


def test_torch_counts_no_receiver_of_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its count would keep the memory for ever if a receiver died: it goes back, and receivers cannot count down."""
    counts: list[tuple[Any, ...]] = []

    def released(cls: type, *args: Any, device: Any = None) -> None:
        counts.append(args)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda self: tuple(SHARED), raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", classmethod(released))
    raw = export_handles([torch.zeros(64, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)])
    assert counts == [(b"counter", 0)] * 2
    assert b"counter" not in raw


def test_only_the_version_whose_handover_failed_is_taken_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is handed over again, and so is one that a restarted engine had: pulling was seven times slower."""
    monkeypatch.setattr(hub, "gpu_id", lambda device: "a GPU")
    monkeypatch.setattr(hub, "export_handles", lambda buckets: b"handles")
    lines = Lines(CPU, 0, 1)
    with line() as made:

        def join(order: TransferOrder) -> str:
            lines.newest = order
            return str(lines.join(order, time.monotonic() + 20.0, cuda=True, gpu="a GPU", nccl="")["way"])

        first, second = (made.begin(version(number), ["worker"]).orders[0] for number in (1, 2))
        assert [join(first), join(first), join(first)] == ["ipc", "pull", "pull"]
        assert join(second) == "ipc"
        lines.done(second, "worker/0")
        assert [join(second), join(second)] == ["ipc", "pull"]
        lines.leave()
