"""One episode: reset, then answers and steps in turn until something ends it; `close` in any case."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...messages.broker import Reply
from ...messages.errors import InvalidField, JobFailed, RolloutMQError
from ...messages.model import GenerateJob, JobFailure, SamplingParams
from ..calls import History, prompt_fields
from ..core import ClientCore
from ..data import as_error, call_either, told
from ..training import seed_of
from .asking import ask
from .environment import Environment, read_step
from .episode import Episode, Stop, Turn
from .limits import EpisodeLimits
from .noting import note_end, note_step, recorded_step

log = logging.getLogger(__name__)
T = TypeVar("T")
LONG = 1 << 14
"""Items of an observation from which on a thread looks at them, so that the loop serves other episodes meanwhile."""


class _Ended(Exception):
    """Ends the episode before the environment says that it is done."""

    def __init__(self, stop: Stop, error: str | None = None) -> None:
        self.stop, self.error = stop, error


class Player:
    """Plays episodes of one run. name: tells the run's jobs from all others of the client. Raises InvalidField."""

    def __init__(
        self,
        core: ClientCore,
        environment: Callable[[Any], Environment],
        limits: EpisodeLimits,
        fields: Mapping[str, Any],
        name: str,
        *,
        repeat: Path | str | None = None,
    ) -> None:
        self._core, self._environment, self._limits, self._name = core, environment, limits, name
        self._repeat = repeat
        self._fields = dict(fields)
        if limits.turn_s is not None:
            self._fields.setdefault("deadline_s", limits.turn_s)
        # Wrong fields concern all episodes, so they are refused here.
        self._sampling = GenerateJob.build(**{**fields, "text": "a", "session_id": name}).sampling

    def name(self, episode: Episode) -> str:
        """The episode's name: the session and the group of its jobs."""
        return f"{self._name}-{episode.number}-{episode.sample}"

    async def play(self, episode: Episode, held: list[Reply]) -> None:
        """Play it to its end. held: gets the outcomes that the episode is made of, to be acknowledged with it.

        What the environment or a worker does wrong is told by `episode.stop` and `episode.error`. Raises what concerns
        the whole pool, such as RedisUnavailable.
        """
        environment: Environment | None = None
        try:
            try:
                environment = self._environment(episode.task)
                for name in ("reset", "step"):
                    if not callable(getattr(environment, name, None)):
                        raise TypeError(f"{type(environment).__name__} has no method {name}")
            except BaseException as raised:
                raise _Ended("failed", f"environment: {_told(as_error(raised))}") from raised
            await _within(self._limits.episode_s, "the episode", self._turns(environment, episode, held))
        except _Ended as ended:
            episode.stop, episode.error = ended.stop, ended.error
        finally:
            if environment is not None:
                await self._core.finish(self._close(environment))
        note_end(self._core.journal, self.name(episode), episode)

    async def _turns(self, environment: Environment, episode: Episode, held: list[Reply]) -> None:
        observation = await self._ask_environment("reset", environment.reset)
        while True:
            given = await self._make_room(episode, observation)
            turn = await self._answer(episode, given, held)
            episode.turns.append(turn)
            known = await self._recorded(episode)
            answer = known or await self._ask_environment("step", environment.step, turn.result)
            try:
                step = read_step(answer)
            except BaseException as raised:  # a number of the environment's own may raise anything
                raise _Ended("failed", _told(as_error(raised))) from raised
            turn.reward, turn.info = step.reward, step.info
            note_step(self._core.journal, self.name(episode), episode, turn, step)
            if self._repeat is not None and self._core.journal is not None:  # before anybody builds on it
                await asyncio.to_thread(self._core.journal.flush)
            if step.done:
                return
            if len(episode.turns) >= self._limits.turns:
                raise _Ended("turns")
            observation = step.observation

    async def _recorded(self, episode: Episode) -> Any:
        if self._repeat is None:
            return None
        return await asyncio.to_thread(recorded_step, self._repeat, self.name(episode), episode)

    # --- the model ---------------------------------------------------------------------------------------------------

    async def _answer(self, episode: Episode, given: dict[str, Any], held: list[Reply]) -> Turn:
        """The next turn. given: the field of a job for the observation. It and the answer go into the history."""
        history, name = episode.history, self.name(episode)
        new = given.get("media", () if episode.turns else self._fields.get("media", ()))
        fields = {
            "prefer_worker": episode.turns[-1].result.worker_id if episode.turns else None,
            **{name: value for name, value in self._fields.items() if name != "media"},
            "sampling": self._sampling_for(history, given),
            "seed": self._seed(episode),
            "group_id": name,
            "session_id": name,
        }
        if "token_ids" in given:
            fields["token_ids"] = np.concatenate([history.token_ids, given["token_ids"]])
        else:
            fields |= given | ({"context_ids": history.token_ids} if len(history.token_ids) else {})
        if media := (*history.media, *new):
            fields["media"] = media
        asked = ask(self._core, f"{name}/{len(episode.turns)}", fields, held)
        try:
            result = await _within(self._limits.turn_s, "the turn", asked)
        except JobFailed as error:
            raise _Ended(_stop_for(error), str(error)) from error
        except InvalidField as error:
            raise _Ended("failed", f"observation: {error}") from error
        prompt, known = fields.get("token_ids", result.prompt_ids), len(history.token_ids)
        if prompt is None or not np.array_equal(prompt[:known], history.token_ids):
            raise RolloutMQError(f"episode {name}: the worker's prompt does not begin with the history")
        episode.parts[-1] = history.given(np.asarray(prompt[known:], np.int32), new).generated(result)
        end = len(episode.history.token_ids)
        return Turn(result, len(episode.parts) - 1, end - len(result.token_ids), end)

    def _seed(self, episode: Episode) -> int | None:
        """Each turn's own: with one seed for all, all episodes of a task would be the same."""
        seed, place = self._fields.get("seed"), f"{episode.number}, {episode.sample}, {len(episode.turns)}"
        return None if seed is None else seed_of(f"seed {seed}, turn {place}")

    def _sampling_for(self, history: History, given: dict[str, Any]) -> SamplingParams:
        left = self._left(history, given)
        if left is None or left >= self._sampling.max_new_tokens:
            return self._sampling
        return self._sampling.model_copy(update={"max_new_tokens": left})

    # --- the context -------------------------------------------------------------------------------------------------

    def _left(self, history: History, given: dict[str, Any]) -> int | None:
        """Tokens that an answer may have. None: without a limit. What text will be as tokens is not known here."""
        if self._limits.tokens is None:
            return None
        return self._limits.tokens - len(history.token_ids) - len(given.get("token_ids", ()))

    async def _make_room(self, episode: Episode, observation: Any) -> dict[str, Any]:
        """The field of a job for the observation to go on with, perhaps in a new part of the episode."""
        given = await _field_for(observation)
        left = self._left(episode.history, given)
        if left is None or left > 0:
            return given
        on_full = self._limits.on_full
        if on_full == "truncate" and episode.turns:
            episode.parts.append(self._newest(episode))
        elif callable(on_full):
            given = await _field_for(await self._ask_environment("on_full", on_full, episode, observation))
            episode.parts.append(History())
        left = self._left(episode.history, given)
        if left is not None and left < 1:
            raise _Ended("context")
        return given

    def _newest(self, episode: Episode) -> History:
        """The first prompt, then the newest turns that fit into half of the limit with it, with their media."""
        assert self._limits.tokens is not None
        ids, part = episode.history.token_ids, len(episode.parts) - 1
        prompt = ids[: episode.turns[0].start]
        starts = [turn.start for turn in episode.turns if turn.part == part]
        fits = [start for start in starts if len(prompt) + len(ids) - start <= self._limits.tokens // 2]
        tail, shown = fits[0] if fits else len(ids), episode.history.shown
        kept = History().given(prompt, [one for _, end, one in shown if end <= len(prompt)])
        return kept.given(ids[tail:], [one for start, _, one in shown if start >= tail])

    # --- the environment ---------------------------------------------------------------------------------------------

    async def _ask_environment(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await _within(self._limits.step_s, what, call_either(function, *args))
        except _Ended:
            raise
        except Exception as error:  # an environment may raise anything; the other episodes go on
            raise _Ended("failed", f"{what}: {_told(error)}") from error

    async def _close(self, environment: Environment) -> None:
        try:
            close = getattr(environment, "close", None)
            if close is not None:
                await _within(self._limits.close_s, "close", call_either(close))
        except Exception as error:
            log.warning("episode: close: %s", _told(error))


async def _within(seconds: float | None, what: str, work: Awaitable[T]) -> T:
    """The answer of `work`. Raises _Ended if it takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise _Ended("timeout", f"{what} took longer than {seconds:g} s") from None
        raise


async def _field_for(observation: Any) -> dict[str, Any]:
    """The field of a job for an observation. Raises _Ended."""
    try:
        if isinstance(observation, list | tuple) and len(observation) > LONG:
            given = await asyncio.to_thread(prompt_fields, observation, "observation")
        else:
            given = prompt_fields(observation, "observation")
        if "token_ids" in given and not len(given["token_ids"]):
            raise InvalidField("observation", observation, "at least one token")
    except InvalidField as error:
        raise _Ended("failed", str(error)) from error
    return given


def _stop_for(error: JobFailed) -> Stop:
    failure = error.failure
    return "timeout" if isinstance(failure, JobFailure) and failure.outcome == "expired" else "failed"


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, _Ended | InvalidField) else told(error)
