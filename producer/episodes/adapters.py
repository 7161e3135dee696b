"""Other libraries' environments, and conversations with tools, as an Environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...messages.model import ChatMessage, RolloutResult
from ..data import ToolRegistry, call_either, run_tool_calls
from .environment import Observation, Step


class GymnasiumEnvironment:
    """An environment with Gymnasium's `reset(seed=…)` and `step(action)`.

    act: the action that an answer is; by default its text. observe: the observation as a prompt; by default a user's
    message with it as text. seed: for `reset`. A truncated episode is done.
    """

    def __init__(
        self,
        env: Any,
        act: Callable[[RolloutResult], Any] = lambda answer: answer.text,
        observe: Callable[[Any], Observation] = lambda seen: [{"role": "user", "content": str(seen)}],
        seed: int | None = None,
    ) -> None:
        self._env, self._act, self._observe, self._seed = env, act, observe, seed

    def reset(self) -> Observation:
        seen, _info = self._env.reset(seed=self._seed)
        return self._observe(seen)

    def step(self, answer: RolloutResult) -> Step:
        seen, reward, terminated, truncated, info = self._env.step(self._act(answer))
        return Step(self._observe(seen), reward, bool(terminated or truncated), info)

    def close(self) -> None:
        self._env.close()


class SkyRLGymEnvironment:
    """An environment of `skyrl_gym`: `init(prompt)`, `step(text)`, `close()`. prompt: messages, for `init`.

    A `postprocessed_action` is in the step's info, and changes nothing: what was sampled stays what it is.
    """

    def __init__(self, env: Any, prompt: Sequence[Mapping[str, Any]]) -> None:
        self._env, self._prompt = env, prompt

    def reset(self) -> Observation:
        prompt, _info = self._env.init([dict(message) for message in self._prompt])
        return list(prompt)

    def step(self, answer: RolloutResult) -> Step:
        said = self._env.step(answer.text)
        info = dict(said.get("metadata") or {})
        if said.get("postprocessed_action") is not None:
            info["postprocessed_action"] = said["postprocessed_action"]
        return Step(said["observations"], said["reward"], bool(said["done"]), info)

    def close(self) -> None:
        self._env.close()


class ToolEnvironment:
    """A conversation in which the model calls tools until it gives an answer without a call.

    The calls of a turn run at the same time. An invalid call, an unknown tool, an exception and a timeout are each told
    to the model as the answer to the call. Turns' rewards are what tool classes in VERL's form give.

    prompt: messages. score(answer): the reward of the last answer; a function or a coroutine function.
    timeout: seconds for each call; `EpisodeLimits.step_s` has to be longer. tools_kwargs: as in `run_tool_calls`, such
    as the right answer for a tool that knows it.
    Pictures and videos that a tool answers with are shown to the model from the next turn on.
    The episodes' jobs need `tools=registry.tools`, and the `tool_parser` of the model.
    """

    def __init__(
        self,
        prompt: Sequence[Mapping[str, Any] | ChatMessage],
        registry: ToolRegistry,
        score: Callable[[RolloutResult], Any] | None = None,
        timeout: float = 30.0,
        tools_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._prompt, self._registry, self._score = prompt, registry, score
        self._timeout, self._tools_kwargs = timeout, tools_kwargs

    async def reset(self) -> Observation:
        return list(self._prompt)

    async def step(self, answer: RolloutResult) -> Step:
        if not answer.tool_calls:
            reward = 0.0 if self._score is None else await call_either(self._score, answer)
            return Step(None, reward, done=True)
        outcomes = await run_tool_calls(answer.tool_calls, self._registry, self._timeout, self._tools_kwargs)
        reward = sum(outcome.reward or 0.0 for outcome in outcomes)
        return Step([outcome.as_message() for outcome in outcomes], reward, info={"outcomes": outcomes})

    def close(self) -> None:
        """Nothing is open."""
