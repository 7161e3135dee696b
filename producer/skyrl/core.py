"""What all of the engine's methods stand on: one client, opened when needed, and what workers say of themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from ...messages.errors import FeatureUnavailable, InvalidField, RolloutMQError
from ...messages.model import WorkerStatus
from ...messages.redis import Keys, default_url
from ..client import RolloutClient
from .calls import Calls
from .texts import Texts

if TYPE_CHECKING:
    from ...sync.publish import WeightPublisher  # torch

KNOWN_S = 5.0
"""So old it may be where asking again would hold up the caller's event loop."""
FRESH_S = 1.0
"""So old what is known of the workers may be where it is asked for again and again, in seconds."""


class EngineCore:
    """State of an engine; see SkyRLEngine for its arguments."""

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        tokenizer: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        publisher: WeightPublisher | None = None,
        timeout_s: float | None = None,
        receiver_ranks: int | None = None,
        receiver_device: str = "cpu",
        weights_timeout_s: float = 120.0,
    ) -> None:
        Keys(pool)
        for name, seconds in (("timeout_s", timeout_s), ("weights_timeout_s", weights_timeout_s)):
            if seconds is not None and not seconds > 0:
                raise InvalidField(name, seconds, "seconds, more than 0")
        if receiver_ranks is not None and receiver_ranks < 1:
            raise InvalidField("receiver_ranks", receiver_ranks, "at least 1")
        self.redis_url, self.pool = redis_url or default_url(), pool
        self.timeout_s, self.weights_timeout_s = timeout_s, weights_timeout_s
        self.sampling_params = dict(sampling_params or {})
        self.texts = Texts(tokenizer)
        self._publisher, self._own_publisher = publisher, False
        self._receiver_ranks, self._receiver_device = receiver_ranks, receiver_device
        self._client: RolloutClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: Calls | None = None
        self._closed = False
        self._workers: list[WorkerStatus] = []
        self._asked_at = float("-inf")

    async def client(self) -> RolloutClient:
        """The pool's client, opened. Raises RedisUnavailable, and RolloutMQError after `teardown`.

        An engine belongs to one event loop at a time; when that one is closed, the next call takes it along to its own.
        """
        if self._closed:
            raise RolloutMQError("this engine was torn down")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RolloutMQError("this engine is in use on another event loop, which still runs")
            self._loop, self._client = loop, None
            self._new_loop()
        if self._client is None:
            self._client = RolloutClient(self.redis_url, self.pool)
        return await self._client.open()

    def _new_loop(self) -> None:
        """Make anew what belongs to an event loop."""
        paused = self._calls is not None and self._calls.paused
        self._calls = Calls(paused)

    async def open_calls(self) -> Calls:
        """What is under way, and the gate. Raises as `client`."""
        await self.client()
        assert self._calls is not None
        return self._calls

    async def workers(self, fresh: bool = True) -> list[WorkerStatus]:
        """The pool's workers; `fresh=False` is content with an answer of the last second."""
        client = await self.client()
        if fresh or time.monotonic() - self._asked_at >= FRESH_S:
            self._workers = await client.workers()
            self._asked_at = time.monotonic()
            if self.texts.model is None and self._workers:
                self.texts.model = self._workers[0].model
        return self._workers

    def workers_now(self) -> list[WorkerStatus]:
        """The same for code that cannot wait: what was known a moment ago, or else a short look from beside the event
        loop; what was known last if Redis does not answer. Raises RedisUnavailable if nothing was."""
        if not self._workers or time.monotonic() - self._asked_at >= KNOWN_S:
            from .look import look  # noqa: PLC0415 – a thread and a loop, for those who ask nothing else

            try:
                self._workers = look(self.redis_url, self.pool)
                self._asked_at = time.monotonic()
            except (OSError, TimeoutError, RedisError):
                if not self._workers:
                    raise
        return self._workers

    async def ready_texts(self) -> Texts:
        """The tokenizer, loaded; of the pool's model if none was given. Raises ConfigError."""
        if self.texts.model is None and not self.texts.given:
            await self.workers(fresh=False)
        await asyncio.to_thread(self.texts.load)
        return self.texts

    async def lacking(self, feature: str) -> FeatureUnavailable | None:
        """The error for a call that needs `feature` of the workers; None if one has it, or if there are none to ask."""
        workers = await self.workers(fresh=False)
        if not workers or any(feature in worker.features for worker in workers):
            return None
        engines = ", ".join(sorted({worker.engine for worker in workers}))
        return FeatureUnavailable(feature, None, f"nothing: no worker of this pool honours it ({engines})")

    def has(self, feature: str) -> bool:
        """Whether a worker of the pool has it, as far as is known; see `workers_now`."""
        return any(feature in worker.features for worker in self.workers_now())
