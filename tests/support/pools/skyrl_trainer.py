"""A SkyRL trainer's rank 0, as a process: makes broadcast groups as SkyRL makes them, and broadcasts as it does.

Takes lines on stdin: "join PORT WORLD GROUP" prints "joined" when that group is complete, "send GROUP SEED" broadcasts
the tensors of `weights(SEED)` in it and prints "sent"; "file GROUP PATH" those of a safetensors file, by name.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NAMES = ("model.embed", "model.norm", "lm_head")
SHAPES = {"model.embed": [40, 16], "model.norm": [16], "lm_head": [16, 40]}
TIMEOUT = timedelta(seconds=60)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """bfloat16 tensors that every process can make."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPES[name], generator=source).to(torch.bfloat16) for name in NAMES}


def request(seed: int, names: tuple[str, ...] = NAMES, **more: torch.Tensor) -> dict[str, Any]:
    """A request with the tensors themselves."""
    tensors = {name: weights(seed)[name] for name in names} | more
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "tensors": list(tensors.values()),
    }


def adapter(folder: Path) -> str:
    """A folder with an adapter as PEFT saves it."""
    from safetensors.torch import save_file  # noqa: PLC0415

    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 32), f"{layer}.lora_B.weight": torch.ones(48, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def stored(path: str) -> list[torch.Tensor]:
    """Tensors of a safetensors file, sorted by name."""
    from safetensors.torch import load_file  # noqa: PLC0415

    return [tensor for _, tensor in sorted(load_file(path).items())]


def update_group(port: int, world: int, name: str, backend: str = "gloo") -> dist.ProcessGroup:
    """Rank 0 of a group beside the default one, with the calls of SkyRL's `init_custom_process_group`."""
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    prefixed = dist.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), prefixed, group_name=name, timeout=TIMEOUT
    )
    distributed_c10d._world.pg_group_ranks[group] = {place: place for place in range(size)}
    return group


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups: dict[str, dist.ProcessGroup] = {}
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "join":
            port, world, name = rest
            groups[name] = update_group(int(port), int(world), name)
            print("joined", flush=True)
        else:
            name, what = rest
            for tensor in weights(int(what)).values() if word == "send" else stored(what):
                dist.broadcast(tensor, 0, group=groups[name])
            print("sent", flush=True)


if __name__ == "__main__":
    main()
