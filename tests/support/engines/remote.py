"""A second SGLang engine beside the tests' own, in a process of its own: only one can run in a process.

It answers requests, and it serves pools: a worker is there as long as its test module needs it, the engine stays.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from support.engines import forking

from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.engine.protocol import EngineInfo, EngineOutput, EngineRequest
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine
from rolloutmq.worker.sglang.weights import run_loader
from rolloutmq.worker.text.tokenizer import ModelTokenizer
from rolloutmq.worker.worker import Worker

START_S = 180.0


class Kept(SGLangEngine):
    """Stays, whatever a worker does; it is started by the first one, or before, and ended by :meth:`end`."""

    _weight_loader = "support.engines.substitute_loader.receive"

    async def start(self) -> None:
        if self._run is None:
            await super().start()

    async def close(self) -> None:
        """Stays."""

    async def end(self) -> None:
        await super().close()

    async def misplace(self, first: int) -> None:
        """See `substitute_loader.misplace`. Nothing runs."""
        manager = self._current().manager
        await run_loader(manager, self._weight_loader, json.dumps({"misplace": first}), self.config.tp_size)

    async def restore(self) -> None:
        """The model as it is on disk, nothing that runs, and nothing in the prefix cache."""
        manager = self._current().manager
        self.abort_all()
        while manager.rid_to_state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # between two looks
        text = json.dumps({"restore": str(Path(self.config.model) / "model.safetensors")})
        await run_loader(manager, self._weight_loader, text, self.config.tp_size)
        await self.operate("flush_cache", {})


@dataclass(frozen=True)
class _Serve:
    """Be a worker; the answer is its id, once it has joined."""

    settings: dict[str, Any]


@dataclass(frozen=True)
class _Leave:
    """End a worker. crash: without a word to anybody, as a lost pod."""

    worker_id: str
    crash: bool


@dataclass(frozen=True)
class _Misplace:
    """Corrupt the engine, as `Kept.misplace` does."""

    first: int


class RemoteWorker:
    """A worker with the engine of a :class:`RemoteEngine`."""

    def __init__(self, engine: RemoteEngine, settings: dict[str, Any]) -> None:
        self._engine = engine
        self.worker_id: str = engine.ask(_Serve(settings)).result(60)

    def leave(self, *, crash: bool = False) -> None:
        """End it, if it has not ended. crash: nobody hears of it, as of a pod that is lost."""
        self._engine.ask(_Leave(self.worker_id, crash)).result(60)


class RemoteEngine:
    """`generate` of an engine elsewhere, and workers that have it. Everything that is asked at once runs together."""

    info: EngineInfo

    def __init__(self, config: SGLangConfig, log: Path | None = None) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = forking.Forked(_run, config, theirs, log=log)
        theirs.close()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        assert self._pipe.poll(START_S), "the engine did not start in time"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        self.info = EngineInfo(**answer)
        threading.Thread(target=self._receive, daemon=True).start()

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """As the engine's; raises what it raises."""
        output: EngineOutput = await asyncio.wrap_future(self.ask(request))
        return output

    @contextmanager
    def worker(self, redis_url: str, **settings: Any) -> Iterator[RemoteWorker]:
        """A worker that has joined. settings: of its WorkerConfig.

        When the last one has left, the engine is as it was before the first one came.
        """
        fixed = {"redis_url": redis_url, "max_running": 8, "lease_s": 3.0, "drain_s": 5.0}
        worker = RemoteWorker(self, fixed | settings)
        try:
            yield worker
        finally:
            worker.leave()

    def misplace(self, first: int) -> None:
        """Have it encode positions from `first` on otherwise, for good. It does not know."""
        self.ask(_Misplace(first)).result(60)

    def close(self) -> None:
        """End it; its own processes end with it."""
        self._pipe.send(None)
        assert self._process.wait(60) == 0

    def ask(self, question: Any) -> Future[Any]:
        """Of the process that has the engine."""
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        self._pipe.send((number, question))
        return future

    def _receive(self) -> None:
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError):
                return
            future = self._waiting.pop(number)
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _run(config: SGLangConfig, pipe: Connection) -> None:
    asyncio.run(_Host(config).serve(pipe))


class _Host:
    """The process that has the engine."""

    def __init__(self, config: SGLangConfig) -> None:
        self._engine = Kept(config)
        self._workers: dict[str, tuple[Worker, asyncio.Task[None]]] = {}

    async def serve(self, pipe: Connection) -> None:
        try:
            await self._engine.start()
        except Exception as error:
            pipe.send(error)
            return
        info = self._engine.info
        pipe.send({one.name: getattr(info, one.name) for one in fields(EngineInfo) if one.name != "adapters"})
        tasks = set()

        async def answer(number: int, question: Any) -> None:
            try:
                output: Any = await self._answer(question)
            except Exception as error:
                output = error
            pipe.send((number, output))

        while (question := await asyncio.to_thread(pipe.recv)) is not None:
            task = asyncio.create_task(answer(*question))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await self._engine.end()

    async def _answer(self, question: Any) -> Any:
        if isinstance(question, _Serve):
            return await self._join(question.settings)
        if isinstance(question, _Leave):
            return await self._leave(question)
        if isinstance(question, _Misplace):
            return await self._engine.misplace(question.first)
        return await self._engine.generate(question)

    async def _join(self, settings: dict[str, Any]) -> str:
        worker = Worker(WorkerConfig(**settings), self._engine, ModelTokenizer(self._engine.config.model))
        serving, joined = asyncio.create_task(worker.run()), asyncio.create_task(worker.joined.wait())
        await asyncio.wait({serving, joined}, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if serving.done():
            await serving
        self._workers[worker.worker_id] = worker, serving
        return worker.worker_id

    async def _leave(self, who: _Leave) -> None:
        worker, serving = self._workers.pop(who.worker_id, (None, None))
        if worker is None or serving is None:
            return
        if who.crash:
            serving.cancel()
            await asyncio.wait({serving})
        else:
            worker.drain()
            await serving
        if not self._workers:
            await self._engine.restore()


def descendants() -> set[int]:
    """Processes below this one; not Python's resource trackers and what engines are forked from, which stay."""
    found = psutil.Process().children(recursive=True)
    stay = forking._server._forkserver_pid
    return {each.pid for each in found if each.pid != stay and "resource_tracker" not in " ".join(each.cmdline())}
