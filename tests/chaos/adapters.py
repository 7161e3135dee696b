"""A trainer's publisher of LoRA adapters, which goes on while everything around it breaks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from rolloutmq.messages.errors import WeightSyncError

NAMES = ("math", "code")
NEWEST_DEMANDED = 3
"""The newest version of an adapter that a job demands."""
PATIENCE_S = 60.0


class Adapters:
    """Versions of a few adapters, one after the other.

    given: every (name, version) that was to be published. committed: the newest version of each that a worker has.
    count: how many versions were committed.
    """

    def __init__(self, publisher: Any, dice: random.Random) -> None:
        self.given: set[tuple[str, int]] = set()
        self.committed: Counter[str] = Counter()
        self.count = 0
        self._publisher, self._dice = publisher, dice
        self._versions: Counter[str] = Counter()

    async def publish(self, name: str) -> bool:
        """One version more. Returns whether a worker has it: faults may take a version along."""
        from support.specimens.adapters import CONFIG, tensors  # noqa: PLC0415 – torch takes seconds, and only here

        self._versions[name] += 1
        version = self._versions[name]
        self.given.add((name, version))
        handle = self._publisher.publish_adapter(name, version, tensors(version), CONFIG)
        try:
            report = await asyncio.to_thread(handle.wait, PATIENCE_S)
        except WeightSyncError:
            return False
        if report.state == "committed":
            self.committed[name] = version
            self.count += 1
        return report.state == "committed"

    async def go_on(self, enough: asyncio.Event) -> None:
        """Until `enough`, and until every job can have the version that it demands."""
        while not enough.is_set() or any(self.committed[name] < NEWEST_DEMANDED for name in NAMES):
            await self.publish(self._dice.choice(NAMES))
            await asyncio.sleep(self._dice.uniform(0, 1.0))
