"""The engine's commands to the workers: halts, memory and caches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from ...messages import errors
from ...messages.errors import (
    EngineError,
    FeatureUnavailable,
    InvalidField,
    RequestRefused,
    RolloutMQError,
    WaitTimeout,
)
from ...messages.model import MEMORY_TAGS
from ..control import NO_ANSWER, Answer, Answers
from .calls import Calls
from .core import EngineCore, positive_seconds

log = logging.getLogger(__name__)
COMMAND_S = 120.0
LET_GO_S = 10.0
MEMORY_S = 60.0
"""SkyRL's default of `sleep` and `wake_up`."""
_CANNOT = frozenset({"RequestRefused", "UnknownAction"})


class MemoryTag:
    """Tags for `sleep` and `wake_up`."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"
    ALL = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
    TRAINING_DEFAULT = (WEIGHTS,)


class WorkerControl:
    """Commands to the pool's workers. SkyRLEngine documents the methods without a docstring.

    halted: the mode in which `halt` halted the workers, "" while they run. asleep: the memory tags that are asleep.
    """

    def __init__(self, core: EngineCore, calls: Calls) -> None:
        self._core, self._calls = core, calls
        self.halted, self._to_lift = "", False
        self.asleep: set[str] = set()

    # --- commands --------------------------------------------------------------------------------------------------

    async def ask(
        self, action: str, params: dict[str, Any] | None = None, *, worker_id: str = "", timeout_s: float = COMMAND_S
    ) -> dict[str, dict[str, Any]]:
        """Each worker's answer, {} in a pool without workers. Workers that left meanwhile are not in it.

        Raises a worker's error under its name, with the worker's id in the text. Raises FeatureUnavailable for a
        command that a worker cannot do, and WaitTimeout if a living worker did not answer.
        """
        client = await self._core.client()
        return await self.done(await client.control.send(action, params, worker_id=worker_id, timeout=timeout_s))

    async def done(self, answers: Answers) -> dict[str, dict[str, Any]]:
        """The results of the workers that executed the command. Raises as `ask` does."""
        silent = [one for one in answers.failed if one.kind == NO_ANSWER]
        alive = {worker.worker_id for worker in await self._core.workers()} if silent else set()
        for one in answers.failed:
            if one not in silent or one.worker_id in alive:
                raise _error(answers.action, one)
        return {worker: dict(result) for worker, result in answers.results.items()}

    # --- halting ---------------------------------------------------------------------------------------------------

    async def halt(self, mode: str) -> None:
        """Halt all workers and the samples that they run. mode: "in_place" or "retract"."""
        self._to_lift = True  # also if it is cancelled, or one refuses: the others are halted
        await self.ask("pause", {"mode": mode})
        self.halted = mode

    async def resume(self) -> None:
        """Let the workers go on, if this engine halted some of them."""
        if self._to_lift:
            await self.ask("resume")
            self._to_lift, self.halted = False, ""

    async def let_go(self) -> None:
        """Before this engine leaves. Workers that it halted go on. What sleeps does not wake: a trainer may use it."""
        try:
            async with asyncio.timeout(LET_GO_S):
                await self.resume()
        except (RolloutMQError, RedisError, OSError) as error:  # TimeoutError is an OSError
            log.warning("workers may still be halted (`rolloutmq control resume`): %s", str(error) or "no answer")
        if self.asleep:
            log.warning("workers are left asleep (`rolloutmq control wake`): %s", ", ".join(sorted(self.asleep)))

    def check_takes_weights(self, what: str) -> None:
        """Raises RequestRefused if this engine has halted all workers in place."""
        if self.halted == "in_place":
            raise RequestRefused(f"{what}: workers that are halted in place take no weights: continue_generation first")

    @contextlib.asynccontextmanager
    async def thawed(self) -> AsyncIterator[None]:
        """Engines that are halted in place go on in this block. A halted one ends no request and takes no weights."""
        frozen = self.halted == "in_place"
        if frozen:
            await self.resume()
        try:
            yield
        finally:
            if frozen:
                await self.halt("in_place")

    async def end_calls(self) -> None:
        """End this engine's calls with the tokens they have."""
        await self._core.client()
        async with self.thawed():
            await self._calls.stop_all()

    # --- memory and caches -----------------------------------------------------------------------------------------

    async def sleep(
        self, tags: Sequence[str], level: int, timeout_s: float, *, abort_first: bool, drain_timeout: float
    ) -> None:
        """Workers release the memory of these tags. () means all."""
        if level not in (1, 2):
            raise InvalidField("level", level, "1 or 2")
        positive_seconds("timeout", timeout_s)
        positive_seconds("drain_timeout", drain_timeout)
        await (self.end_calls() if abort_first else self._core.client())
        await self._calls.idle(drain_timeout)
        await self.ask("sleep", {"tags": list(tags)} if tags else {}, timeout_s=timeout_s)
        self.asleep |= set(tags or MEMORY_TAGS)

    async def wake(self, tags: Sequence[str], timeout_s: float, end_sync: Callable[[], Awaitable[Any]]) -> None:
        """Workers take memory back. end_sync: awaited when the weights' memory is back, before the KV cache's.

        Graphs wake with the KV cache, because nothing is generated without them, and SkyRL's loop does not name them.
        """
        if "kv_cache" in tags:
            tags = [*tags, *({"cuda_graph"} - set(tags))]
        asleep = [tag for tag in tags or MEMORY_TAGS if tag in self.asleep]
        weights_first = "weights" in asleep
        if weights_first:
            await self._wake(["weights"], timeout_s)
        await end_sync()
        if not weights_first:
            await self._wake(tags, timeout_s)
        elif rest := [tag for tag in asleep if tag != "weights"]:
            await self._wake(rest, timeout_s)

    async def _wake(self, tags: Sequence[str], timeout_s: float) -> None:
        await self.ask("wake", {"tags": list(tags)} if tags else {}, timeout_s=timeout_s)
        self.asleep -= set(tags or MEMORY_TAGS)

    async def reset_caches(self, running_too: bool) -> None:
        """Drop all cached prefixes. running_too: also the KV cache of what runs; workers compute it again."""
        if not running_too or self.halted == "retract":
            await self.flush_caches()
            return
        async with self.thawed():
            await self.halt("retract")
            try:
                await self.flush_caches()
            finally:
                await self.resume()

    async def flush_caches(self) -> None:
        """Drop all cached prefixes. Sleeping workers have none and are not asked."""
        if not self.asleep:
            await self.ask("flush_cache")


def memory_tags(args: Sequence[Any], tags: Any, kwargs: dict[str, Any]) -> list[str]:
    """The memory tags in the arguments of `sleep` or `wake_up`, in any of SkyRL's forms. Raises InvalidField."""
    if kwargs:
        name = min(kwargs)
        raise InvalidField(name, kwargs[name], "one of tags, level, timeout, abort_first, drain_timeout")
    given = tags if tags is not None else args[0] if args else None
    found = [str(tag) for tag in ([given] if isinstance(given, str) else given or ())]
    for tag in found:
        if tag not in MEMORY_TAGS:
            raise InvalidField("tags", tag, f"some of {', '.join(MEMORY_TAGS)}, or none for all")
    return found


def _error(action: str, answer: Answer) -> RolloutMQError:
    text = f"worker {answer.worker_id}: {answer.error}"
    if answer.kind in _CANNOT:
        return FeatureUnavailable(action, None, text)
    if answer.kind == NO_ANSWER:
        return WaitTimeout(f"{action}: {text}")
    if answer.kind == "InvalidField":
        return InvalidField(action, None, text)
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, RolloutMQError) and "__init__" not in vars(kind):
        return kind(text)
    return EngineError(f"{action}: {text}")
