"""SGLang's own update, as the benchmark drives it: how tensors are cut into requests, and the group engines join."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from benchmarks.sync.stock import StockGroup, request_of, split
from rolloutmq.messages.errors import TransferTimeout
from rolloutmq.sync.wire.store import join_store, serve_store

TENSORS = [
    ("a", torch.arange(6, dtype=torch.bfloat16).view(2, 3)),
    ("b", torch.arange(5, dtype=torch.float32)),
    ("c", torch.tensor(7, dtype=torch.int8)),
    ("d", torch.arange(4, dtype=torch.bfloat16)),
]


def names(bucket_bytes: int | None) -> list[list[str]]:
    return [[name for name, _ in lot] for lot in split(TENSORS, bucket_bytes)]


def test_lots_are_full_and_every_tensor_lies_where_its_dtype_may() -> None:
    assert names(None) == [["a", "b", "c"], ["d"]]  # d would begin at byte 33
    assert names(1 << 20) == [["a", "b", "c"], ["d"]]
    assert names(31) == [["a"], ["b", "c"], ["d"]]
    assert names(1) == [["a"], ["b"], ["c"], ["d"]]


def test_a_bucket_is_sglangs_own_flattened_bucket() -> None:
    """The trainer sends slices of one memory, in which a lot's tensors lie as they would in SGLang's bucket."""
    from rolloutmq.worker.cpu_support import prepare_engine  # noqa: PLC0415

    prepare_engine()
    bucket = pytest.importorskip("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorBucket
    (lot, _) = split(TENSORS, None)
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in lot])
    theirs = bucket(named_tensors=lot)
    assert torch.equal(flat, theirs.get_flattened_tensor())
    rebuilt = bucket(flattened_tensor=flat, metadata=theirs.get_metadata()).reconstruct_tensors()
    assert all(torch.equal(tensor, dict(lot)[name]) for name, tensor in rebuilt)


def test_requests_say_what_is_broadcast() -> None:
    (lot, _) = split(TENSORS, None)
    assert request_of(lot, bucketed=True) == {
        "names": ["a", "b", "c"],
        "dtypes": ["bfloat16", "float32", "int8"],
        "shapes": [[2, 3], [5], []],
        "bucketed": True,
    }


def engine_rank(port: int, name: str, into: torch.Tensor, rank: int, world: int) -> None:
    """Joins as torch's own helper does for SGLang (`init_custom_process_group`): prefix, group, device."""
    store = PrefixStore(name, TCPStore("127.0.0.1", port, world, is_master=False))
    group = ProcessGroupGloo(PrefixStore("cpu/", PrefixStore(f"{name}/", store)), rank, world)
    group.broadcast(into, 0).wait()


def test_engines_that_join_by_sglangs_key_layout_receive() -> None:
    store = serve_store("127.0.0.1")
    received = [torch.zeros(5), torch.zeros(5)]
    engines = [
        threading.Thread(target=engine_rank, args=(store.port, "g", into, rank, 3))
        for rank, into in enumerate(received, 1)
    ]
    for engine in engines:
        engine.start()
    group = StockGroup(store, "g", world=3, host="127.0.0.1", device=torch.device("cpu"), timeout_s=30)
    group.send([torch.arange(5.0)], 30)
    for engine in engines:
        engine.join(30)
    assert all(torch.equal(into, torch.arange(5.0)) for into in received)


def test_engines_that_do_not_come_or_do_not_receive_cost_one_timeout() -> None:
    store = serve_store("127.0.0.1")
    with pytest.raises(TransferTimeout, match="not in group"):
        StockGroup(store, "empty", world=2, host="127.0.0.1", device=torch.device("cpu"), timeout_s=0.3)
    released, joined = threading.Event(), threading.Event()

    def idle() -> None:
        inner = PrefixStore("g/", PrefixStore("g", join_store("127.0.0.1", store.port, 30).raw))
        group = ProcessGroupGloo(PrefixStore("cpu/", inner), 1, 2)
        joined.set()
        released.wait(60)
        del group

    thread = threading.Thread(target=idle)
    thread.start()
    group = StockGroup(store, "g", world=2, host="127.0.0.1", device=torch.device("cpu"), timeout_s=30)
    assert joined.wait(30)
    try:
        with pytest.raises(TransferTimeout, match="broke off"):
            group.send([torch.zeros(64 << 20, dtype=torch.uint8)], 0.5)
    finally:
        released.set()
        thread.join(30)
