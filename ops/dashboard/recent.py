"""A trainer's journal beside a live pool: what it consumed, and with which rewards, read again and again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from ...messages.errors import RolloutMQError
from ...messages.journal import read
from ..journal import Run
from .history import History
from .verdict import WINDOW_S, Rewards

log = logging.getLogger(__name__)
EVERY_S = 5.0
SHARE = 20
"""One part of the time in so many is spent reading."""
LATE_S = 60.0
"""Writers have clocks of their own: what is older than the newest by less may be new."""


class Recent:
    """Follows a journal; `run` does so until it is cancelled.

    Of the last look: history; frame, the State of its end; staleness of the samples of the last 15 minutes before it;
    rewards by version. Before the first one the last three are None.
    """

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if there is no such folder."""
        self.folder = folder
        self._recording = Run()
        self._newest = -math.inf
        self.history = History(self._recording)
        self.frame: Mapping[str, Any] | None = None
        self.staleness: Mapping[int, int] | None = None
        self.rewards: Mapping[int, Rewards] | None = None
        read(folder)

    async def run(self) -> None:
        """Read what is new, at a pace that costs little."""
        while True:
            began = time.monotonic()
            try:
                self.history = await asyncio.to_thread(self.look)
            except (RolloutMQError, OSError) as error:
                log.warning("the journal %s cannot be read: %s", self.folder, error)
            await asyncio.sleep(max(EVERY_S, SHARE * (time.monotonic() - began)))

    def look(self) -> History:
        """Read what is new. Returns a history with it."""
        since, newest = self._newest - LATE_S, self._newest
        for entry in read(self.folder, since=since, on_problem=self._recording.problem):
            self._recording.add(entry)
            newest = max(newest, min(entry.at, time.time()))  # a clock may be wrong
        history = self.history
        if newest > self._newest:
            self._newest, history = newest, History(self._recording)
        end = history.ended
        self.frame = history.state(end, brief=True)
        self.staleness, self.rewards = history.staleness(end - WINDOW_S, end), history.rewards(end)
        return history
