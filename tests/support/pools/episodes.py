"""What tests of episodes share: an environment, and ways to play it.

`python -m support.pools.episodes URL COUNT` is a client to be killed: it plays so many episodes of the run "run".
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from rolloutmq import Episode, RolloutClient, RolloutResult, SamplingParams

SHORT = SamplingParams(max_new_tokens=4)


class Counting:
    """Ends after `last` turns; each is rewarded with its number. Its observations are the turn's number, twice."""

    def __init__(self, task: int, last: int = 3) -> None:
        self.task, self.last, self.turn, self.closed = task, last, 0, 0

    def reset(self) -> list[int]:
        return [1, 2, self.task]

    def step(self, answer: RolloutResult) -> tuple[list[int], float, bool, dict[str, Any]]:
        self.turn += 1
        return [self.turn, self.turn], self.turn, self.turn == self.last, {"seen": answer.token_ids.tolist()}

    def close(self) -> None:
        self.closed += 1


async def played(client: RolloutClient, make: Callable[[Any], Any], count: int = 1, **more: Any) -> list[Episode]:
    """All episodes, by task and sample."""
    found = [it async for it in client.episodes(range(count), make, **{"sampling": SHORT} | more)]
    return sorted(found, key=lambda it: (it.number, it.sample))


async def left(client: RolloutClient, count: int) -> bool:
    """Whether so many outcomes are on the client's reply stream."""
    return int(await client.broker.redis.xlen(client.broker.keys.reply(client.client_id))) == count


class Keep:
    """Makes environments of a kind, and keeps them."""

    def __init__(self, kind: Callable[[Any], Any]) -> None:
        self.kind, self.made = kind, list[Any]()

    def __call__(self, task: Any) -> Any:
        self.made.append(self.kind(task))
        return self.made[-1]

    @property
    def closed(self) -> list[int]:
        return [it.closed for it in self.made]


async def _play_run(url: str, count: int) -> None:
    async with RolloutClient(url, client_id="client") as client:
        await played(client, Counting, count, run="run")


if __name__ == "__main__":
    asyncio.run(_play_run(sys.argv[1], int(sys.argv[2])))
