"""What test_torchrun.py runs under torchrun: a trainer of two ranks with their own default group, which publishes.

    torchrun ... torchrun_trainer.py <folder> <redis url> [dies]

The model is sharded by FSDP2 and trained beside a twin that is not; both see the same batches, so they stay equal to
the bit. Rank 0 writes the twin as `<version>.pt`, and goes on when `<version>.checked` is there. With "dies" rank 1 is
killed before the second version. Each rank leaves what it saw in `<rank>.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from rolloutmq import WeightPublisher

DEADLINE_S = 30.0


def unsharded() -> nn.Module:
    """Extents that two ranks cannot share evenly, and two dtypes."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 7).to(torch.bfloat16))


def sharded() -> nn.Module:
    model = unsharded()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    hidden = model[2](model[1](model[0](batch)))
    model[3](hidden.to(torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Trainer:
    """One rank."""

    def __init__(self, folder: Path, url: str) -> None:
        self.rank, self.folder, self.steps = dist.get_rank(), folder, 0
        self.models = [sharded(), unsharded()]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.train()
        self.environment = dict(os.environ)
        self.publisher = WeightPublisher(url)

    def train(self, together: bool = True) -> None:
        """A step of both, and a collective of the trainer's own."""
        self.steps += 1
        for model, optimizer in list(zip(self.models, self.optimizers, strict=True))[not together :]:
            step(model, optimizer, self.steps)
        if together:
            one = torch.ones(1)
            dist.all_reduce(one)
            assert one.item() == 2

    def publish(self, version: int) -> dict[str, Any]:
        """One version, with training going on while it is on its way."""
        if self.rank == 0:
            part = self.folder / f"{version}.part"
            torch.save(self.models[1].state_dict(), part)
            part.rename(self.folder / f"{version}.pt")
        handle = self.publisher.publish(version, self.models[0].named_parameters())
        self.train()
        report = handle.wait(DEADLINE_S)
        self.train()
        deadline = time.monotonic() + DEADLINE_S
        while self.rank == 0 and not (self.folder / f"{version}.checked").exists():
            assert time.monotonic() < deadline, f"version {version} was not checked"
            time.sleep(0.01)  # between two looks
        dist.barrier()
        return {"state": report.state, "workers": list(report.workers), "failures": report.failures}


def alone(trainer: Trainer) -> dict[str, Any]:
    """What rank 0 meets with when it gathers with a dead one, and what it can still do."""
    try:
        trainer.publisher.publish(2, trainer.models[0].named_parameters())
        error = ""
    except RuntimeError as met:
        error = str(met)
    newest = trainer.publisher.last_version
    trainer.train(together=False)
    torch.save(trainer.models[1].state_dict(), trainer.folder / "2.pt")
    report = trainer.publisher.publish(2, trainer.models[1].named_parameters()).wait(DEADLINE_S)
    return {"error": error, "newest": newest, "state": report.state, "workers": list(report.workers)}


def main(folder: Path, url: str, dies: bool) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    default = dist.group.WORLD
    trainer = Trainer(folder, url)
    found: dict[str, Any] = {"reports": [trainer.publish(1)]}
    if dies:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends as soon as a rank is dead
        dist.barrier()
        if trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        found["alone"] = alone(trainer)
    else:
        found["reports"].append(trainer.publish(2))
        trainer.train()
    trainer.publisher.close()
    changed = dict(os.environ).items() ^ trainer.environment.items()
    found["environment"] = sorted(name for name, _ in changed)
    found["default group"] = dist.group.WORLD is default and dist.get_world_size() == 2
    (folder / f"{trainer.rank}.json").write_text(json.dumps(found))
    if not dies:
        dist.barrier()
    os._exit(0)  # gloo's threads, ended by the interpreter's own way out, abort the process now and then


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "dies" in sys.argv[3:])
