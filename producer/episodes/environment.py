"""What an environment is, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...messages.errors import InvalidField
from ...messages.model import RolloutResult
from ..calls import Prompt

Observation = Prompt
"""Token ids, a text, or messages, perhaps with media in OpenAI's form ({"type": "image", "image": …}).

Messages are rendered by the model's chat template, behind the tokens so far. Each turn is shown all media so far.
"""


class Step(NamedTuple):
    """What an environment answers to a turn. A plain tuple of four will do, too.

    observation: what the model is shown next; None is allowed if the episode is done. reward: of this turn. done:
    whether the episode is over. info: anything; it is kept in `Turn.info`.
    """

    observation: Observation | None
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = {}


class Environment(Protocol):
    """One episode's world. Each method is a coroutine function or a plain one; plain ones run in threads.

    Calls of one environment come one after the other, and perhaps from different threads. Only if a plain method has
    exceeded its deadline does `close` come while it still runs.
    """

    def reset(self) -> Observation | Awaitable[Observation]:
        """The first prompt."""
        ...

    def step(self, answer: RolloutResult) -> Any:
        """The Step that follows the model's answer, or an awaitable of it.

        answer: `token_ids`; for prompts of text or messages also `text`, and `tool_calls` if the job has tools.
        """
        ...

    def close(self) -> Any:
        """Called once when the episode has ended, however it ended."""
        ...


def read_step(given: Any) -> Step:
    """What `step` returned, checked. Raises InvalidField."""
    if not isinstance(given, tuple) or len(given) != len(Step._fields):
        raise InvalidField("step", given, "a Step, or a tuple: observation, reward, done, info")
    observation, reward, done, info = given
    try:
        number = float(reward)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # RuntimeError: torch's, for several numbers
        number = math.nan
    if isinstance(reward, str | bytes) or not math.isfinite(number):
        raise InvalidField("step.reward", reward, "a finite number")
    if not isinstance(done, bool | np.bool_):
        raise InvalidField("step.done", done, "True or False")
    if not isinstance(info, Mapping):
        raise InvalidField("step.info", info, "a mapping")
    return Step(observation, number, bool(done), info)
