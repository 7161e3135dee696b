"""SkyRL's own generator over a pool: `SkyRLEngine` in place of its inference client. docs/skyrl.md explains it.

.venv/bin/rolloutmq redis
.venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq worker --model out/tiny --dtype float32
python examples/skyrl_generator.py  # in an environment with SkyRL: skyrl 0.3.0, skyrl-gym 0.4.0, Python 3.12
"""

import asyncio
import os

import skyrl_gym
from skyrl.train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import AutoTokenizer

from rolloutmq.producer.skyrl import SkyRLEngine

MODEL = os.environ.get("MODEL", "out/tiny")
TURNS = 3


class Echo(BaseTextEnv):
    """Tells the model how much it said, for three turns. The reward of a turn is the share of letters in it."""

    def __init__(self, env_config, extras):
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action):
        self.turns += 1
        reward = sum(char.isalpha() for char in action) / max(1, len(action))
        done = self.turns >= self.max_turns
        said = [] if done else [{"role": "user", "content": f"That was {len(action)} characters. Go on."}]
        return BaseTextEnvStepOutput(observations=said, reward=reward, done=done, metadata={})


skyrl_gym.register(id="echo", entry_point=f"{__name__}:Echo")


def trajectories(count):
    """SkyRL's input for so many trajectories."""
    return {
        "prompts": [[{"role": "user", "content": f"Story {number}"}] for number in range(count)],
        "env_classes": ["echo"] * count,
        "env_extras": [{} for _ in range(count)],
        "sampling_params": {"max_generate_length": 24, "temperature": 0.0, "logprobs": 0},
        "trajectory_ids": [TrajectoryID(str(number), 0) for number in range(count)],
        "batch_metadata": None,
    }


def generator(engine, tokenizer, **settings):
    """SkyRL's generator over an engine with SkyRL's interface. settings: further ones of its configuration."""
    sampling = SamplingParams(max_generate_length=24, temperature=0.0, logprobs=0)
    config = GeneratorConfig(
        max_turns=TURNS, max_input_length=400, sampling_params=sampling, n_samples_per_prompt=1, **settings
    )
    return SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), engine, tokenizer)


async def main():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    engine = SkyRLEngine(tokenizer=tokenizer, pause_mode="in_place")
    output = await generator(engine, tokenizer).generate(trajectories(8))
    for ids, mask, rewards in zip(output["response_ids"], output["loss_masks"], output["rewards"], strict=True):
        print(f"{len(ids)} tokens, {sum(mask)} of them generated, reward {sum(rewards):.2f}")
    await engine.teardown()


if __name__ == "__main__":
    asyncio.run(main())
