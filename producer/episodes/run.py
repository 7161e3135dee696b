"""Hundreds of episodes at once, each handed out when it has ended, and none left behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...messages.broker import Reply
from ...messages.errors import InvalidField
from ...messages.ids import new_id
from ...messages.model import LogprobOptions, SamplingParams, TurnFields
from ...messages.nearest import instead_of
from ..core import ClientCore
from ..inbox import HandOut, own_context
from .environment import Environment
from .episode import Episode
from .limits import EpisodeLimits
from .player import Player


class _Played(NamedTuple):
    """An episode that has ended. held: the outcomes it is made of, not acknowledged yet."""

    episode: Episode
    held: list[Reply]


def run_episodes(
    core: ClientCore,
    tasks: Iterable[Any],
    environment: Callable[[Any], Environment],
    *,
    n: int,
    limits: EpisodeLimits,
    run: str | None,
    start: int,
    concurrency: int,
    repeat: Path | str | None,
    fields: Mapping[str, Any],
) -> AsyncGenerator[Episode]:
    """See RolloutClient.episodes."""
    for name, value, least in (("n", n, 1), ("start", start, 0), ("concurrency", concurrency, 1)):
        if value < least:
            raise InvalidField(name, value, f"at least {least}")
    if run is not None and not 1 <= len(run) <= 64:
        raise InvalidField("run", run, "a name of 1 to 64 characters, or None")
    for name in fields.keys() - TurnFields.__optional_keys__:
        unknown = "episodes has no such argument"
        raise InvalidField(name, fields[name], instead_of(name, fields[name], unknown, _ARGUMENTS, _PARTS))
    player = Player(core, environment, limits, fields, run or new_id(), repeat=repeat)
    episodes = (Episode(task, number, sample) for number, task in enumerate(tasks, start) for sample in range(n))
    return _Run(core, player, resumable=run is not None).all(episodes, concurrency)


_ARGUMENTS = ("n", "limits", "run", "start", "concurrency", "repeat", *TurnFields.__optional_keys__)
_PARTS = {"limits": EpisodeLimits, "sampling": SamplingParams, "logprobs": LogprobOptions}


class _Run:
    """Episodes under way. resumable: what is not handed out stays on the reply stream for the run's next process."""

    def __init__(self, core: ClientCore, player: Player, resumable: bool) -> None:
        self._core, self._player, self._resumable = core, player, resumable
        self._running: set[asyncio.Task[_Played]] = set()
        self._ended: deque[_Played] = deque()

    async def all(self, episodes: Iterator[Episode], window: int) -> AsyncGenerator[Episode]:
        """The episodes as they end, at most `window` of them begun and not handed out."""
        await self._core.open()
        try:
            while await self._next_ended(episodes, window):
                one = self._ended.popleft()
                # The thread of a plain loop may have stopped waiting when the episode reaches it. The hand-out then
                # puts it in front of the others, so that it is the next one again.
                out = HandOut(one.held, self._core.reader.ack, partial(self._not_handed_out, one))
                try:
                    yield one.episode
                except GeneratorExit:
                    out.give_back()
                    raise
                out.acknowledge()
                if one not in self._ended:
                    await self._forget(one.episode)
        finally:
            await self._core.finish(self._leave())

    def _not_handed_out(self, one: _Played, _replies: list[Reply]) -> None:
        self._ended.appendleft(one)

    async def _next_ended(self, episodes: Iterator[Episode], window: int) -> bool:
        """Begin what may be begun, and wait until an episode has ended; False if there is none."""
        for episode in islice(episodes, window - len(self._running) - len(self._ended)):
            self._running.add(asyncio.create_task(self._play(episode), context=own_context()))
        if not self._ended and self._running:
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._running.discard(task)
                self._ended.append(task.result())
        return bool(self._ended)

    async def _play(self, episode: Episode) -> _Played:
        held: list[Reply] = []
        try:
            await self._player.play(episode, held)
        except BaseException:
            await self._core.finish(self._give_up(episode, held))
            raise
        return _Played(episode, held)

    async def _leave(self) -> None:
        """End everything: episodes under way are cancelled, and their environments closed."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._ended += [task.result() for task in self._running if not task.cancelled() and task.exception() is None]
        for one in self._ended:
            await self._give_up(*one)

    async def _give_up(self, episode: Episode, held: list[Reply]) -> None:
        """Nobody gets the episode."""
        if self._resumable:
            self._core.hand_out(held).give_back()
        else:
            self._core.reader.ack(held)
            await self._forget(episode)

    async def _forget(self, episode: Episode) -> None:
        """Nobody wants anything else of the episode: jobs that exceeded a deadline, or of an earlier process."""
        inbox, group = self._core.inbox, self._player.name(episode)
        if left := inbox.group_jobs(group):
            await self._core.give_up(left)
            for job_id in inbox.group_jobs(group):
                self._core.reader.ack(inbox.abandon(job_id))
