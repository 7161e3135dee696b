"""Environments of other libraries, and conversations with tools, played on a pool."""

from __future__ import annotations

import json
from typing import Any

from support.pools.pool import worker
from support.specimens.byte_tokenizer import Bytes

from rolloutmq import Episode, RolloutClient, RolloutResult, SamplingParams
from rolloutmq.messages.model import ToolCall
from rolloutmq.producer.data import ToolRegistry
from rolloutmq.producer.episodes import (
    Calculator,
    GymnasiumEnvironment,
    SkyRLGymEnvironment,
    ToolEnvironment,
)
from rolloutmq.worker.scripted.engine import ScriptedEngine

ECHO = SamplingParams(max_new_tokens=6)


async def play(redis_db: str, client: RolloutClient, environment: Any) -> Episode:
    async with worker(redis_db, engine=ScriptedEngine(echo=True), tokenizer=Bytes()):
        (episode,) = [it async for it in client.episodes([0], lambda _: environment, sampling=ECHO)]
    return episode


class Guess:
    """In the form of a Gymnasium environment."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.log.append(("reset", seed))
        return "guess", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.log.append(("step", action))
        return "again", 0.5, False, len(self.log) == 3, {"n": len(self.log)}

    def close(self) -> None:
        self.log.append("close")


async def test_a_gymnasium_environment(redis_db: str, client: RolloutClient) -> None:
    env = Guess()
    episode = await play(redis_db, client, GymnasiumEnvironment(env, seed=3))
    assert env.log == [("reset", 3), ("step", "user\n"), ("step", "user\n"), "close"]
    assert (episode.stop, episode.reward, [it.info for it in episode.turns]) == ("done", 1.0, [{"n": 2}, {"n": 3}])


class SkyRLEnv:
    """In the form of skyrl_gym's BaseTextEnv (0.4.0)."""

    def __init__(self) -> None:
        self.turns, self.closed = 0, 0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": "go"}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        observations = [{"role": "user", "content": f"{action}?"}]
        done = self.turns == 2
        return {
            "observations": [] if done else observations,
            "reward": 1.0,
            "done": done,
            "metadata": {"turn": self.turns},
            "postprocessed_action": "cut",
        }

    def close(self) -> None:
        self.closed += 1


async def test_an_environment_of_skyrl_gym(redis_db: str, client: RolloutClient) -> None:
    env = SkyRLEnv()
    episode = await play(redis_db, client, SkyRLGymEnvironment(env, [{"role": "system", "content": "be"}]))
    assert (episode.stop, episode.error, episode.reward, env.turns, env.closed) == ("done", None, 2.0, 2, 1)
    assert episode.turns[1].info == {"turn": 2, "postprocessed_action": "cut"}
    assert b"sys" in bytes(id_ for id_ in episode.history.token_ids if id_ < 256)


async def test_tools_answer_until_there_is_no_call() -> None:
    registry = ToolRegistry()
    registry.add(Calculator.SCHEMA, Calculator())
    prompt = [{"role": "user", "content": "6 * 7?"}]
    environment = ToolEnvironment(prompt, registry, score=lambda answer: float(answer.text == "42"), timeout=5.0)
    assert await environment.reset() == prompt

    def answer(text: str, *calls: ToolCall) -> RolloutResult:
        return RolloutResult(
            job_id="j", sample=0, n=1, group_id="g", token_ids=[], finish_reason="stop", worker_id="w", attempt=1,
            text=text, tool_calls=calls,
        )  # fmt: skip

    step = await environment.step(
        answer(
            json.dumps({}),
            ToolCall(id="1", name="calculator", arguments={"expression": "6 * 7"}),
            ToolCall(id="2", name="calculator", error="its arguments are no JSON"),
            ToolCall(id="3", name="weather", arguments={}),
        )
    )
    assert [(it.role, it.tool_call_id, it.content) for it in step.observation] == [  # type: ignore[union-attr]
        ("tool", "1", "42"),
        ("tool", "2", "Error: its arguments are no JSON"),
        ("tool", "3", "Error: there is no tool 'weather'"),
    ]
    assert not step.done
    last = await environment.step(answer("42"))
    assert (last.reward, last.done) == (1.0, True)
