"""Updates, over NCCL or on one GPU by CUDA IPC, while receivers are killed, stopped and broken at random.

Also a script, which prints the figures:

python tests/gpu/test_gpu_soak.py --updates 200 [--receivers 3] [--seed 5] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from support.peers.soak import soak


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_hundred_updates_with_random_kills() -> None:
    found = soak(200, 3 if torch.cuda.device_count() > 2 else 2, "cuda")
    print(json.dumps(found))
    assert (found["wrong"], found["hangs"]) == (0, 0)
    assert min(found["kills"], found["stops"], found["flips"], found["torn_sends"]) > 0


def main() -> int:
    parser = argparse.ArgumentParser(description="updates with random kills: no hang, no wrong bit")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--receivers", type=int, default=0, help="default: one on each GPU but the first; 3 on CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seed", type=int, default=5)
    told = parser.parse_args()
    receivers = told.receivers or (3 if told.device == "cpu" else max(1, torch.cuda.device_count() - 1))
    found = soak(told.updates, receivers, told.device, told.seed)
    print(json.dumps(found))
    return int(bool(found["wrong"] or found["hangs"]))


if __name__ == "__main__":
    sys.exit(main())
