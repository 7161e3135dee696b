"""What test_trl_colocated.py runs under torchrun: two ranks of a GRPOTrainer that share their GPU with a worker.

    torchrun ... colocated_ranks.py <model> <folder> <redis url>

Each rank leaves in `<rank>.txt` its steps, and how often its model computed while the worker was awake.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.trainers import trl as made

from rolloutmq.producer.blocking import BlockingPoolControl


def main(model: Path, folder: Path, url: str) -> None:
    awake = 0

    def look() -> None:
        nonlocal awake
        (answer,) = control.version().check().values()
        awake += answer.result["asleep"] != ["kv_cache"]

    with BlockingPoolControl(url) as control:
        trainer, rollouts = made.grpo_trainer(model, folder, url, colocated=["kv_cache"], max_steps=2)
        trainer.model.register_forward_hook(lambda *_: look())
        trainer.train()
        rollouts.close()
        rank = trainer.accelerator.process_index
        (folder / f"{rank}.txt").write_text(f"{trainer.state.global_step} {awake}")
        trainer.accelerator.wait_for_everyone()
    os._exit(0)  # gloo's threads, ended by the interpreter's own way out, abort the process now and then


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
