"""A process of the benchmark that answers calls, line by line, and the parent's handle on it.

Requests are JSON lines on the child's stdin, {"id", "call", "args"}. Answers, {"id", "value"} or {"id", "error"}, come
on the child's original stdout. Everything that prints goes to stderr. A child ends when its stdin does, so none
outlives the parent.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from inspect import iscoroutinefunction
from operator import attrgetter
from typing import Any

from rolloutmq.messages.errors import RolloutMQError, WaitTimeout

KILL_S = 10.0
LINE_LIMIT = 64 << 20
"""Bytes. The arrival times of a whole stall measurement are one line."""


class ChildFailed(RolloutMQError):
    """A call failed in the child, or the child is gone."""


def serve(state: object, goodbye: Callable[[], Awaitable[None]] | None = None) -> None:
    """Answer calls of methods of `state`, and of what it has ("raw.run"), until stdin ends. It runs its own event loop
    and does not return.

    Each call is a task of its own. A method that is no coroutine runs in a thread, and may block.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    async def answer(request: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            call = attrgetter(request["call"])(state)
            if iscoroutinefunction(call):
                reply["value"] = await call(**request["args"])
            else:
                reply["value"] = await asyncio.to_thread(call, **request["args"])
        except Exception as error:
            traceback.print_exc()
            reply["error"] = f"{type(error).__name__}: {error}"
        out.write(json.dumps(reply) + "\n")

    async def main() -> None:
        reader = asyncio.StreamReader(limit=LINE_LIMIT)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if goodbye is not None:
            async with asyncio.timeout(KILL_S):
                await goodbye()

    try:
        asyncio.run(main())
    finally:
        os._exit(0)  # threads may hang in a collective, and engine processes end with the thread that started them


class Child:
    """The parent's handle on a child process. `call` has a deadline. If it is missed, the child is killed."""

    def __init__(self, module: str, name: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._module = module
        self._environment = dict(os.environ) | dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._last = 0

    async def start(self) -> None:
        """Start the process. The first call waits for its imports."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            env=self._environment,
        )
        self._reading = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        running = self._process is not None and self._process.returncode is None
        return running and self._reading is not None and not self._reading.done()

    async def call(self, name: str, timeout_s: float, /, **args: Any) -> Any:
        """Return the child's answer. Raises ChildFailed, or WaitTimeout, after which the child has been killed."""
        if self._process is None or self._process.stdin is None or not self.alive:
            raise ChildFailed(f"{self.name} is not running")
        self._last += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[self._last] = future
        request = json.dumps({"id": self._last, "call": name, "args": args}) + "\n"
        try:
            self._process.stdin.write(request.encode())
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            await self.kill()
            raise WaitTimeout(f"{self.name}: no answer to {name!r} within {timeout_s:.0f} s; it was ended") from None

    async def close(self) -> None:
        """Let it end by itself, or kill it."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(KILL_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def kill(self) -> None:
        """Kill it. SGLang's processes end with it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            reply = json.loads(line)
            future = self._pending.pop(reply["id"], None)
            if future is None or future.done():
                continue
            if "error" in reply:
                future.set_exception(ChildFailed(f"{self.name}: {reply['error']}"))
            else:
                future.set_result(reply["value"])
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(ChildFailed(f"{self.name} ended"))


def now() -> float:
    """Return seconds of the monotonic clock that all processes of this host share."""
    return time.monotonic()
