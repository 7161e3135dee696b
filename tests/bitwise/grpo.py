"""TRL's GRPOTrainer over the pool, reproducible, with a record of each step. It goes on from its newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .record import ENGINE_DTYPE, GPU, Record, deterministic


def newest(folder: Path) -> str | None:
    """The newest checkpoint that is whole: whoever is killed while it writes one leaves a part."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda it: -int(it.name.rpartition("-")[2])):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def main(url: str, model_path: str, folder: str, steps: int) -> None:
    from support.trainers import trl as made  # noqa: PLC0415 – imports TRL

    deterministic()
    record, out = Record(Path(folder)), Path(folder) / "grpo"

    class Recorded(made.GRPOTrainer):  # type: ignore[misc]
        """Keeps the exact loss, which TRL's log rounds."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.exact_loss = super().training_step(*args, **kwargs)
            return self.exact_loss

    class Noted(made.PoolRollouts):
        """Keeps what a step sampled."""

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            found = super().generate(*args, **kwargs)
            pairs = zip(found[1], found[2], strict=True)
            samples.extend((ids, [self._version] * len(ids), np.ravel(logprobs)) for ids, logprobs in pairs)
            return found

    class Writer(made.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
            self.norm = float(sum(float(norm) ** 2 for norm in norms) ** 0.5)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            record.step(state.global_step - 1, samples, trainer.exact_loss, self.norm)
            samples.clear()

    samples: list[Any] = []
    args = made.GRPOConfig(
        str(out), **made.SMALL | {"max_completion_length": 24, "use_cpu": not GPU}, max_steps=steps,
        save_steps=1, save_total_limit=2, seed=3,
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0,
    )  # fmt: skip
    model = made.AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    rollouts = Noted(url, reproducible=True, dtype=ENGINE_DTYPE)
    trainer = Recorded(
        model, made.fourths, args, made.prompts(4 * steps), rollout_func=rollouts, callbacks=[Writer()],
        processing_class=made.AutoTokenizer.from_pretrained(model_path),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=newest(out))
    record.end(trainer.model)
    rollouts.close()
