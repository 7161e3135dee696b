"""GRPOTrainer over real workers: on-policy whatever dies; TRL's correction, tools, environments and adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.lazily import Lazily
from support.pools.worker_process import WorkerProcess

from rolloutmq.messages.errors import InvalidField

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.usefixtures("trl_worker")]
made, peft = Lazily("support.trainers.trl"), Lazily("peft")
GAP = 1e-4
"""Of a log-probability in float32."""
TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}


def logged(trainer: Any, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


def check_correction(trainer: Any, steps: int) -> None:
    """TRL took its importance ratios, and trainer and engine agree on every token: the pool had this step's weights."""
    gaps = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(gaps) == steps
    assert max(gaps) <= GAP
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * steps, abs=1e-3)


def test_every_step_samples_with_its_own_weights(
    tiny: Path, trl_redis: str, second_worker: WorkerProcess, tmp_path: Path
) -> None:
    """And a worker that is killed costs nothing."""
    scored: list[int] = []

    def rewards(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        scored.append(len(completion_ids))
        return made.fourths(completion_ids)

    trainer, rollouts = made.grpo_trainer(
        tiny, tmp_path, trl_redis, rewards=rewards, given={"callbacks": [made.At(1, second_worker.kill)]}, **TRUNCATED
    )
    trainer.train()
    assert rollouts.weights.version - rollouts.weights.first_version == 2, "a version for each of three steps"
    rollouts.close()
    check_correction(trainer, 3)
    assert scored == [made.BATCH] * 3


def test_a_trainer_that_takes_several_steps_with_its_samples_is_corrected(
    tiny: Path, trl_redis: str, tmp_path: Path
) -> None:
    trainer, rollouts = made.grpo_trainer(tiny, tmp_path, trl_redis, num_iterations=2, max_steps=4, **TRUNCATED)
    trainer.train()
    rollouts.close()
    ratios = logged(trainer, "sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)
    assert len(ratios) == 2, "sampled twice for four steps"


def test_tools_and_environments_go_through_the_pool(tiny: Path, trl_redis: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def rewards(completions: list[Any], completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        seen.extend(completions)
        return made.fourths(completion_ids)

    given = {"environment_factory": made.Library, "processing_class": made.calling_tokenizer(tiny)}
    trainer, rollouts = made.grpo_trainer(
        tiny, tmp_path, trl_redis, rewards=rewards, given=given, max_steps=1, max_completion_length=64,
        max_tool_calling_iterations=1, generation_kwargs={"max_new_tokens": 6}, **TRUNCATED,
    )  # fmt: skip
    trainer.train()
    rollouts.close()
    check_correction(trainer, 1)
    assert logged(trainer, "rewards/Library/mean") == [1.0]
    assert {tuple(message["role"] for message in one) for one in seen} == {("assistant", "tool", "assistant")}


def test_an_adapter_is_merged_for_the_copy_and_trained_alone(tiny: Path, trl_redis: str, tmp_path: Path) -> None:
    modules = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM")
    trainer, rollouts = made.grpo_trainer(
        tiny, tmp_path, trl_redis, given={"peft_config": config}, learning_rate=5e-2, **TRUNCATED
    )
    trainer.train()
    rollouts.close()
    check_correction(trainer, 3)
    changed = {name for name, it in trainer.model.named_parameters() if it.requires_grad}
    assert changed
    assert all("lora_" in name for name in changed)


def test_images_and_vllm_are_refused() -> None:
    rollouts = made.PoolRollouts("redis://127.0.0.1:1")
    with pytest.raises(InvalidField, match="use_vllm"):
        rollouts([], SimpleNamespace(args=SimpleNamespace(use_vllm=True)))
    with pytest.raises(InvalidField, match="images"):
        rollouts.generate([[1]], [["picture"]], 1)
    with pytest.raises(InvalidField, match=r"adapter='policy': .*in a reproducible run"):
        made.PoolRollouts("redis://127.0.0.1:1", adapter="policy", reproducible=True)
