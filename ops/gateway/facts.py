"""What a gateway knows of its pool, read when somebody asks and the last reading is old."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import PurePath
from typing import NamedTuple

from redis.exceptions import NoPermissionError, RedisError

from ...messages.broker import Broker
from ...messages.errors import RedisUnavailable, RolloutMQError
from ...messages.model import WorkerStatus
from ...producer.diagnosis import PoolReading, read_pool, reasons

log = logging.getLogger(__name__)
FRESH_S = 1.0
ANSWER_S = 5.0
"""A reading that takes longer counts as none: Redis is away."""


class Model(NamedTuple):
    """name: for clients. path: as the workers call it. context: tokens of prompt and answer. "" and 0 while no worker
    has said them."""

    name: str
    path: str
    context: int

    @property
    def names(self) -> set[str]:
        """What a request may call it."""
        return {self.name, self.path, PurePath(self.path).name} - {""}


class PoolFacts:
    """The pool's workers, model, adapters and versions. name: of the model for clients; "" for the workers' own."""

    def __init__(self, broker: Broker, name: str = "") -> None:
        self._broker, self._name = broker, name
        self._reading: PoolReading | None = None
        self._at = float("-inf")
        self._task: asyncio.Task[PoolReading] | None = None

    async def read(self, max_age_s: float = FRESH_S) -> PoolReading:
        """The pool, no older than that; all who ask at the same time are told the same. Raises RedisUnavailable."""
        if self._reading is None or time.monotonic() - self._at > max_age_s:
            self._reading = await asyncio.shield(self._newest())
        return self._reading

    def _newest(self) -> asyncio.Task[PoolReading]:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read())
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waits is told
        return self._task

    async def _read(self) -> PoolReading:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._reading = await read_pool(self._broker)
        except TimeoutError:
            raise RedisUnavailable(f"Redis has not answered within {ANSWER_S:g} s") from None
        self._at = time.monotonic()
        return self._reading

    async def _known(self) -> PoolReading:
        """The pool. While requests keep coming none of them waits for it to be read."""
        if time.monotonic() - self._at > FRESH_S:
            self._newest()
        return await self.read(2 * FRESH_S)

    async def model(self) -> Model:
        """What the pool's workers serve."""
        found = (await self._known()).workers
        path = next((it.model for it in found if it.model), "")
        return Model(self._name or path, path, max((it.context_length for it in found), default=0))

    async def adapters(self) -> dict[str, int]:
        """LoRA adapter -> its committed version."""
        return dict((await self._known()).adapters_at)

    async def honours(self, feature: str) -> bool:
        """Whether a worker's engine does."""
        return any(feature in worker.features for worker in (await self._known()).workers)

    async def unready(self) -> str | None:
        """Why the pool can serve no requests; None if it can."""
        try:
            reading = await self.read()
        except NoPermissionError as error:
            log.error("docs/redis.md says what a gateway's user may: %s", error)
            return "the gateway's user may not read the pool in Redis"
        except (RedisError, OSError, RolloutMQError) as error:
            log.warning("not ready: %s", error)
            return "the pool's Redis does not answer"  # where it is is no stranger's business
        if any(serves(worker) for worker in reading.alive):
            return None
        return "; ".join(one.told(reading.at) for one in reasons(reading)) or "no worker serves"


def serves(worker: WorkerStatus) -> bool:
    """Whether it generates now, or as soon as the weights that it takes are in."""
    return worker.state in {"serving", "updating"}
