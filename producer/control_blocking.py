"""PoolControl for plain loops: every call waited for."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

from .control import PoolControl


class BlockingPoolControl:
    """The methods of PoolControl without asyncio; arguments, answers and errors are the same, method by method.

    May be used from several threads. Use it in `with`, or close it.
    """

    def __init__(self, redis_url: str | None = None, pool: str = "default") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolloutmq-control", daemon=True)
        self._thread.start()

        async def build() -> PoolControl:
            return PoolControl(redis_url, pool)

        try:
            self._control = self._run(build())
        except BaseException:
            self._stop()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(PoolControl, name, None)
        if name.startswith("_") or not asyncio.iscoroutinefunction(method):
            raise AttributeError(f"{type(self).__name__} has no {name}: see PoolControl for what there is")
        bound = getattr(self._control, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(bound(*args, **kwargs))

        return call

    def close(self) -> None:
        """Disconnect; calls that wait in other threads must have ended. Safe to call twice."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._control.aclose())
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the wait ends in the loop, too
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
