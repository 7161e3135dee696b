"""A second SGLang engine beside the tests' own, in a process of its own: only one can run in a process."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any

import psutil
from support.engines import forking

from rolloutmq.worker.engine.protocol import EngineInfo, EngineOutput, EngineRequest
from rolloutmq.worker.sglang.engine import SGLangConfig

START_S = 180.0


class RemoteEngine:
    """`generate` of an engine elsewhere. Requests of one event loop run together."""

    info: EngineInfo

    def __init__(self, config: SGLangConfig) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = forking.Forked(_run, config, theirs)
        theirs.close()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        assert self._pipe.poll(START_S), "the engine did not start in time"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        self.info = EngineInfo(**answer)
        threading.Thread(target=self._receive, daemon=True).start()

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """As the engine's; raises what it raises."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        future: asyncio.Future[EngineOutput] = loop.create_future()
        self._waiting[number] = loop, future
        self._pipe.send((number, request))
        return await future

    def close(self) -> None:
        """End it; its own processes end with it."""
        self._pipe.send(None)
        assert self._process.wait(60) == 0

    def _receive(self) -> None:
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError):
                return
            loop, future = self._waiting.pop(number)
            settle = future.set_exception if isinstance(answer, BaseException) else future.set_result
            loop.call_soon_threadsafe(settle, answer)


def _run(config: SGLangConfig, pipe: Connection) -> None:
    asyncio.run(_serve(config, pipe))


async def _serve(config: SGLangConfig, pipe: Connection) -> None:
    from rolloutmq.worker.sglang.engine import SGLangEngine  # noqa: PLC0415

    engine = SGLangEngine(config)
    try:
        await engine.start()
    except Exception as error:
        pipe.send(error)
        return
    told = {one.name: getattr(engine.info, one.name) for one in fields(EngineInfo) if one.name != "adapters"}
    pipe.send(told)
    tasks = set()

    async def answer(number: int, request: EngineRequest) -> None:
        try:
            output: Any = await engine.generate(request)
        except Exception as error:
            output = error
        pipe.send((number, output))

    while (question := await asyncio.to_thread(pipe.recv)) is not None:
        task = asyncio.create_task(answer(*question))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await engine.close()


def descendants() -> set[int]:
    """Processes below this one; not Python's resource trackers and what engines are forked from, which stay."""
    found = psutil.Process().children(recursive=True)
    stay = forking._server._forkserver_pid
    return {each.pid for each in found if each.pid != stay and "resource_tracker" not in " ".join(each.cmdline())}
