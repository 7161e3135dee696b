"""What test_gather.py runs under torchrun: two ranks of a trainer with their own default group, one case after another.

Each case returns, or is asserted right here; what each rank returned goes to <folder>/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rolloutmq.messages import InvalidField
from rolloutmq.sync.packing import buckets
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.tensors.digester import digest

CASES: list[Callable[[int], Any]] = []


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CASES.append(function)
    return function


def unsharded() -> nn.Module:
    """Extents that two ranks cannot share evenly, one that leaves nothing to the second, two dtypes, a buffer."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(1, 7).to(torch.bfloat16))
    model.register_buffer("steps", torch.tensor(3))
    return model


def sharded() -> nn.Module:
    model = unsharded()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def digests(packed: PackedWeights) -> dict[str, str]:
    return {spec.name: spec.digest for spec in packed.snapshot().manifest.tensors}


def expected(model: nn.Module) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


def the_group_works() -> None:
    """The trainer's next collective meets the other rank's, not a gather that it left out."""
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 2


class Gathered:
    """Watches what DTensor.full_tensor has made and is still in memory: bytes, at most `allowed` of them.

    Gloo's own thread lets go of a finished collective's tensor a moment later: it is given that moment.
    """

    def __init__(self, allowed: int = 1 << 30) -> None:
        self.calls = self.most = 0
        self._allowed = allowed
        self._living: list[tuple[Any, int]] = []

    def call(self, tensor: DTensor, **how: Any) -> torch.Tensor:
        whole = self._original(tensor, **how)
        self.calls += 1
        self._living.append((StorageWeakRef(whole.untyped_storage()), whole.numel() * whole.element_size()))
        deadline = time.monotonic() + 2
        while (living := self._count()) > self._allowed and time.monotonic() < deadline:
            os.sched_yield()
        self.most = max(self.most, living)
        return whole

    def _count(self) -> int:
        self._living = [one for one in self._living if not one[0].expired()]
        return sum(nbytes for _, nbytes in self._living)

    @contextmanager
    def watch(self) -> Iterator[Gathered]:
        self._original = DTensor.full_tensor
        watch = self

        def full_tensor(tensor: DTensor, **how: Any) -> torch.Tensor:
            return watch.call(tensor, **how)

        DTensor.full_tensor = full_tensor
        try:
            yield self
        finally:
            DTensor.full_tensor = self._original


@case
def fsdp2(rank: int) -> Any:
    model = sharded()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    packed = PackedWeights(1, model.state_dict().items(), 100, leader=rank == 0)
    the_group_works()
    if rank:
        return {"buckets": len(packed.buckets), "names": [place.name for place in packed.places.tensors]}
    assert digests(packed) == expected(unsharded())
    return {"buckets": len(packed.buckets), "names": [place.name for place in packed.places.tensors]}


@case
def training_goes_on(rank: int) -> Any:
    model = sharded()
    reference = unsharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = PackedWeights(1, model.named_parameters(), leader=rank == 0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    second = PackedWeights(2, model.named_parameters(), leader=rank == 0, like=first.places)
    assert second.places is first.places
    the_group_works()
    if rank == 0:
        assert digests(first) == {name: digest(tensor) for name, tensor in reference.named_parameters()}
        with torch.no_grad():
            after = {name: digest(tensor - 0.1) for name, tensor in reference.named_parameters()}
        assert digests(second) == after
    return None


@case
def never_the_whole_model(rank: int) -> Any:
    """Of 40 tensors of 4 KB each, in buckets of four."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = [(f"t{i}", distribute_tensor(torch.full((32, 32), float(i)), mesh, [Shard(0)])) for i in range(40)]
    with Gathered(allowed=(1 if rank else 5) * 4096).watch() as gathered:
        packed = PackedWeights(1, tensors, 4 * 4096, leader=rank == 0)
    if rank == 0:
        assert [tensor[0, 0].item() for _, tensor in packed.snapshot().tensors()] == list(range(40))
    return {"calls": gathered.calls, "most": gathered.most}


@case
def a_stream_that_gathers_by_itself(rank: int) -> Any:
    model = sharded()
    stream = ((name, parameter.full_tensor()) for name, parameter in model.named_parameters())
    packed = PackedWeights(1, stream, 100, leader=rank == 0)
    if rank == 0:
        assert digests(packed) == {name: digest(tensor) for name, tensor in unsharded().named_parameters()}
    return None


@case
def dropped_tensors_are_not_gathered(rank: int) -> Any:
    model = sharded()
    with Gathered().watch() as gathered:
        packed = PackedWeights(
            1,
            model.named_parameters(),
            rename=lambda name: None if name.endswith("bias") else f"model.{name}",
            leader=rank == 0,
        )
    the_group_works()
    return {"calls": gathered.calls, "names": [place.name for place in packed.places.tensors]}


@case
def other_placements(rank: int) -> Any:
    """Tensor parallelism: columns, copies, sums not yet made; and both ways at once."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    whole = {name: torch.randn(3, 5) for name in ("columns", "copies", "sums", "both")}
    tensors = {
        "columns": distribute_tensor(whole["columns"], mesh, [Shard(1)]),
        "copies": distribute_tensor(whole["copies"], mesh, [Replicate()]),
        "sums": DTensor.from_local(whole["sums"] / 2, mesh, [Partial()]),
        "both": distribute_tensor(whole["both"], both, [Shard(0), Shard(0)]),
        "parameter": nn.Parameter(distribute_tensor(whole["both"], mesh, [Shard(1)])),
    }
    packed = PackedWeights(1, tensors, leader=rank == 0)
    if rank == 0:
        assert digests(packed) == {
            "parameter": digest(whole["both"]),
            **{name: digest(tensor) for name, tensor in whole.items()},
        }
    return None


@case
def a_collective_under_way(rank: int) -> Any:
    """Functional collectives give a tensor that waits when it is first used."""
    under_way = collectives.all_gather_tensor(torch.full((1 << 16,), float(rank)), 0, dist.group.WORLD)
    assert type(under_way) is not torch.Tensor
    packed = PackedWeights(1, [("w", under_way)])
    ((_, tensor),) = packed.snapshot().tensors()
    return {"first": tensor[0].item(), "last": tensor[-1].item(), "elements": tensor.numel()}


def refused(*args: Any, **how: Any) -> str:
    try:
        PackedWeights(*args, **how)
    except (InvalidField, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@case
def a_name_twice(rank: int) -> Any:
    model = sharded()
    twice = [("0.weight", model[0].weight), *model.named_parameters()]
    said = refused(1, twice, leader=rank == 0)
    the_group_works()
    return said


@case
def the_lead_cannot_copy(rank: int) -> Any:
    def broken(*_: Any) -> None:
        raise RuntimeError("no memory left")

    model, honest = sharded(), buckets.fill
    buckets.fill = broken
    try:
        said = refused(1, model.named_parameters(), 100, leader=rank == 0)
    finally:
        buckets.fill = honest
    the_group_works()
    return said


@case
def a_mesh_without_the_lead(rank: int) -> Any:
    tensor = DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [1]), [Shard(0)], run_check=False)
    tensors = [("w", tensor)]
    return {"led by 0": refused(1, tensors, leader=rank == 0), "led by 1": refused(1, tensors, leader=rank == 1)}


@case
def without_storage(rank: int) -> Any:
    with torch.device("meta"):
        model = fully_shard(nn.Linear(2, 4))
    assert isinstance(model.weight, DTensor)
    return refused(1, [("w", model.weight)], leader=rank == 0)


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, found = dist.get_rank(), {}
    for one in CASES:
        try:
            found[one.__name__] = {"returned": one(rank)}
        except Exception:
            found[one.__name__] = {"failed": traceback.format_exc()}
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
