"""The state that all parts of the engine share: its settings, its client, the tokenizer and the workers' status."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from redis.exceptions import RedisError

from ...messages.broker import broker_of
from ...messages.errors import FeatureUnavailable, InvalidField, RolloutMQError
from ...messages.model import WorkerStatus
from ...messages.redis import Keys, connect, default_url
from ..client import RolloutClient
from ..data import Texts
from ..inbox import FeatureCheck
from .versions import VersionNames

KNOWN_S = 5.0
"""The oldest list of workers, in seconds, for calls where a new one would block the caller's event loop."""
TEARDOWN_S = 20.0
INTERFACES = (
    "skyrl_train.inference_engines.base",
    "skyrl.backends.skyrl_train.inference_engines.base",
    "skyrl.backends.skyrl_train.inference_servers.base",
)
"""The modules with SkyRL's InferenceEngineInterface in its releases, the oldest first."""
NOBODY = "no worker has joined this pool"
LOOK_S = 5.0
"""How long `workers_now` may block the caller's event loop, in seconds."""


class EngineCore:
    """The state that the engine's parts share. SkyRLEngine documents the arguments.

    A core belongs to one event loop at a time. When that loop is closed, the next call moves the core to its own loop
    and calls every function in `when_loop_changes`. These replace the objects of the old loop.
    """

    def __init__(
        self,
        redis_url: str | None,
        pool: str,
        tokenizer: Any,
        sampling_params: Mapping[str, Any] | None,
        timeout_s: float | None,
    ) -> None:
        Keys(pool)
        self.redis_url, self.pool = redis_url or default_url(), pool
        self.timeout_s = positive_seconds("timeout_s", timeout_s)
        self.sampling_params = dict(sampling_params or {})
        self.texts, self.versions = Texts(tokenizer), VersionNames()
        self.when_loop_changes: list[Callable[[], None]] = []
        self._client: RolloutClient | None = None
        self._features: FeatureCheck | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        self._workers: list[WorkerStatus] = []
        self._asked_at = float("-inf")

    async def client(self) -> RolloutClient:
        """The pool's client, opened. Raises RedisUnavailable, and RolloutMQError after `teardown`."""
        if self.closed:
            raise RolloutMQError("this engine was torn down")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RolloutMQError("this engine is in use on another event loop, which still runs")
            self._loop, self._client, self._features = loop, None, None
            for renew in self.when_loop_changes:
                renew()
        if self._client is None:
            self._client = RolloutClient(self.redis_url, self.pool)
        return await self._client.open()

    async def close(self, close_others: Callable[[], Awaitable[None]]) -> None:
        """Refuse all later calls, cancel what is open, disconnect and close the others, in TEARDOWN_S at most."""
        self.closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TEARDOWN_S):
                try:
                    if self._client is not None and self._loop is asyncio.get_running_loop():
                        with contextlib.suppress(RolloutMQError, OSError):
                            await self._client.cancel_all()
                        await self._client.aclose()
                finally:
                    await close_others()

    async def workers(self, fresh: bool = True) -> list[WorkerStatus]:
        """The pool's workers. fresh: with their numbers of now. Otherwise they are read when one has joined or left."""
        client = await self.client()
        if fresh:
            self._know(await client.workers())
        else:
            self._features = self._features or FeatureCheck(client.broker)
            self._know(await self._features.workers())
        if self.texts.model is None and self._workers:
            self.texts.model = self._workers[0].model
        return self._workers

    def workers_now(self) -> list[WorkerStatus]:
        """The workers, for code that cannot await. The list may be KNOWN_S old; if it is older, another thread asks.

        If Redis does not answer, this is the last list. Raises RedisUnavailable or TimeoutError if there is none.
        """
        if not self._workers or time.monotonic() - self._asked_at >= KNOWN_S:
            try:
                with ThreadPoolExecutor(1, "rolloutmq-look") as thread:
                    self._know(thread.submit(asyncio.run, self._ask_apart()).result())
            except (OSError, TimeoutError, RedisError):
                if not self._workers:
                    raise
        return self._workers

    async def _ask_apart(self) -> list[WorkerStatus]:
        """Ask over a connection of its own: the client's belongs to the caller's event loop."""
        async with asyncio.timeout(LOOK_S), connect(self.redis_url, pool=self.pool) as redis:
            return await broker_of(redis, self.pool).workers()

    def _know(self, workers: list[WorkerStatus]) -> None:
        self._workers, self._asked_at = workers, time.monotonic()

    async def ready_texts(self) -> Texts:
        """The loaded tokenizer. By default it is the one of the pool's model. Raises ConfigError."""
        if self.texts.model is None and not self.texts.given:
            await self.workers(fresh=False)
        await asyncio.to_thread(self.texts.load)
        return self.texts

    async def lacking(self, feature: str) -> FeatureUnavailable | None:
        """The error for a call that needs `feature`, or None: a worker has it, or there is no worker to ask."""
        workers = await self.workers(fresh=False)
        if not workers or any(feature in worker.features for worker in workers):
            return None
        engines = ", ".join(sorted({worker.engine for worker in workers}))
        return FeatureUnavailable(feature, None, f"nothing: no worker of this pool honours it ({engines})")


def positive_seconds(name: str, seconds: float | None) -> float | None:
    """`seconds` if they are more than 0 or None. Raises InvalidField."""
    if seconds is not None and not seconds > 0:
        raise InvalidField(name, seconds, "seconds, more than 0")
    return seconds


def register(engine: type) -> None:
    """Make the engine's class a virtual subclass of SkyRL's interface, if SkyRL is here; without it nothing happens."""
    for name in INTERFACES:
        try:
            there = name in sys.modules or find_spec(name) is not None
            interface = getattr(import_module(name), "InferenceEngineInterface", None) if there else None
        except Exception:
            continue
        if interface is not None:
            interface.register(engine)
