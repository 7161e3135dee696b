"""What the tests of TRL's trainers share: a small task, trainers of it, and an account of their own of each sample."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rolloutmq.worker.cpu_support import prepare_transformers

prepare_transformers()
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import torch  # noqa: E402
import trl  # noqa: E402, F401
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402

from rolloutmq.producer.trl import PoolRollouts, PoolRolloutWorker, PoolSample, PoolWeightTransfer, prepare_cpu  # noqa: E402

SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "learning_rate": 1e-3,
    "logging_steps": 1, "report_to": [], "bf16": False, "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip
CALLS = {
    "defaults": {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "pool"}}}],
    },
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"content": "text"}},
}
"""A response template that reads a call of `look_up` into every completion: a random model makes none of its own."""


BATCH = SMALL["per_device_train_batch_size"]
WITH_CALLS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompts(count: int = 16) -> Dataset:
    """Prompts of different texts, with a column that reward functions get."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"Say {i}"}], "place": i} for i in range(count)])


def fourths(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """The share of tokens whose id is a multiple of four."""
    return [sum(token % 4 == 0 for token in ids) / len(ids) for ids in completion_ids]


def calling_tokenizer(model: Path) -> Any:
    """The model's tokenizer; every completion calls `look_up`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template, tokenizer.chat_template = CALLS, WITH_CALLS
    return tokenizer


class Library:
    """An environment with one tool. A conversation that looks up what `calling_tokenizer` has it look up earns 1."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def reset(self, **row: Any) -> str:
        self.words = []
        return f" ({row['place']})"

    def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: the word
        """
        self.words.append(word)
        return "workers"

    def get_reward(self) -> float:
        return float(self.words == ["pool"])


class Account(TrainerCallback):
    """What a test counts for itself: samples as the trainer gets them, and the weights as they are sent."""

    def __init__(self) -> None:
        self.samples: list[PoolSample] = []
        self.trained: list[tuple[int, int]] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def watch(self, weights: PoolWeightTransfer, worker: PoolRolloutWorker) -> None:
        """Look on at both."""
        send, judge = weights.send_weights, worker.rollout_buffer._judge

        def send_weights(pairs: Any) -> None:
            sent = {name: tensor.clone() for name, tensor in pairs}
            send(iter(sent.items()))
            self.weights[weights.version] = sent

        def taken(sample: PoolSample) -> bool:
            self.samples.append(sample)
            return judge(sample)

        weights.send_weights, worker.rollout_buffer._judge = send_weights, taken  # type: ignore[method-assign]

    def logprob_gaps(self, model: Path) -> dict[int, float]:
        """By version, the largest difference between the engine's log-probability of a token and the trainer's.

        The trainer's is computed again, with the weights that the token says it was sampled with.
        """
        gaps: dict[int, float] = {}
        again = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        sampled: dict[int, list[PoolSample]] = {}
        for sample in self.samples:
            assert sample.versions is not None
            for version in set(sample.versions.tolist()):
                sampled.setdefault(version, []).append(sample)
        for version, state in self.weights.items():
            again.load_state_dict(state, strict=False)
            for sample in sampled.get(version, ()):
                mine = torch.tensor(sample.versions == version)
                ids = torch.tensor(sample.input_ids)[None]
                with torch.no_grad():
                    logits = again(input_ids=ids).logits[0, :-1].float()
                found = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
                gap = (found - torch.tensor(sample.old_log_probs)[1:])[mine[1:]].abs().max()
                gaps[version] = max(gaps.get(version, 0.0), float(gap))
        return gaps


class At(TrainerCallback):
    """Does something once, after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self._step, self._act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if state.global_step == self._step:
            self._act()


class Trained(TrainerCallback):
    """Which samples each step trained on, by what the worker's queue handed over: the trainer takes 8 for each step, in
    order."""

    def __init__(self, account: Account) -> None:
        self._account, self.steps = account, dict[int, list[tuple[int, int]]]()

    def kept(self, worker: Any) -> None:
        """Look on at what TRL is given to train on."""
        take = worker.rollout_buffer._judge
        self._given: list[tuple[int, int]] = []

        def taken(sample: Any) -> bool:
            if ok := take(sample):
                self._given.append(sample.key)
            return bool(ok)

        worker.rollout_buffer._judge = taken

    def on_step_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        self._began = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        done = sum(len(keys) for keys in self.steps.values())
        self.steps[state.global_step] = self._given[done : done + BATCH]


def async_trainer(
    model: Path, out: Path, redis_url: str, *, rewards: Any = fourths, client_id: str | None = None,
    callbacks: Any = (), tools: Any = None, environment_factory: Any = None, tokenizer: Any = None,
    join_timeout_s: float = 10.0, **fields: Any,
) -> tuple[AsyncGRPOTrainer, PoolRolloutWorker, PoolWeightTransfer]:  # fmt: skip
    """An AsyncGRPOTrainer as a user makes one."""
    prepare_cpu()
    args = AsyncGRPOConfig(str(out), **{"max_steps": 4, "save_strategy": "no", **SMALL, **fields})
    # Where a pool cannot keep up, "auto" goes on with a cache of older weights: `logprob_gaps` has only the newer ones.
    weights = PoolWeightTransfer(redis_url, join_timeout_s=join_timeout_s, mode="resume")
    given = {"processing_class": tokenizer, "tools": tools, "environment_factory": environment_factory}
    worker = PoolRolloutWorker(weights, str(model), args, prompts(), rewards, client_id=client_id, **given)
    trainer = AsyncGRPOTrainer(
        str(model), rewards, args, prompts(), rollout_worker=worker, weight_transfer=weights,
        callbacks=[worker, *callbacks], **given,
    )  # fmt: skip
    return trainer, worker, weights


def grpo_trainer(
    model: Path, out: Path, redis_url: str, *, rewards: Any = fourths, given: Any = None, colocated: Any = (),
    **fields: Any,
) -> Any:  # fmt: skip
    """A GRPOTrainer as a user makes one, and its rollouts."""
    args = GRPOConfig(str(out), **{"max_steps": 3, "save_strategy": "no", **SMALL, **fields})
    rollouts = PoolRollouts(redis_url, colocated=colocated)
    return GRPOTrainer(str(model), rewards, args, prompts(), rollout_func=rollouts, **(given or {})), rollouts
