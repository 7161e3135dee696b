"""How long an episode may be, in turns, seconds and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ...messages.errors import InvalidField
from .episode import Episode

OnFull = Literal["stop", "truncate"] | Callable[[Episode, Any], Any]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. Raises InvalidField.

    turns: answers of the model. turn_s: seconds for one answer, the wait in the queue included. step_s: seconds for
    `reset`, and for each `step`. episode_s: seconds for all of it. close_s: seconds that `close` is waited for. None
    is without a limit.
    tokens: of prompt, answers and observations together. An answer gets at most what is left. The length of messages is
    known only when they have been rendered, so the last ones may exceed it: leave the engine's context some room.
    on_full: what to do when no token is left. "stop": the episode ends. "truncate": it goes on with the first prompt
        and the newest turns, in at most half of `tokens`. A function (or a coroutine function) of the episode and the
        newest observation gives the prompt to go on with, such as a summary. In the last two cases the episode gets a
        further part, and a row for each part.
    """

    turns: int = 32
    turn_s: float | None = 600.0
    step_s: float | None = 60.0
    episode_s: float | None = 3600.0
    close_s: float = 10.0
    tokens: int | None = None
    on_full: OnFull = "stop"

    def __post_init__(self) -> None:
        for name in ("turns", "tokens"):
            value = getattr(self, name)
            if name == "tokens" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidField(name, value, "an integer, at least 1")
        for name in ("turn_s", "step_s", "episode_s", "close_s"):
            value = getattr(self, name)
            if value is None and name != "close_s":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise InvalidField(name, value, "seconds, above 0" + (", or None" if name != "close_s" else ""))
        if self.on_full not in ("stop", "truncate") and not callable(self.on_full):
            raise InvalidField("on_full", self.on_full, '"stop", "truncate", or a function')
