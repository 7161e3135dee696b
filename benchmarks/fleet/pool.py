"""A pool for the fleet's benchmarks: real workers in processes of their own, and when each of them had each version."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import statistics
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import redis
import torch
from safetensors.torch import load_file

from rolloutmq import WeightPublisher
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.sync.wire import Talk

from ..parts import busy_s

POOL = "fleet"
BUCKETS, BUCKET_BYTES = 16, 1 << 20
_start = multiprocessing.get_context("forkserver")
_start.set_forkserver_preload(
    ["rolloutmq.worker.worker", "rolloutmq.worker.scripted", "rolloutmq.sync.receive", "rolloutmq.sync.adapters"]
)


def weights(version: int, buckets: int = BUCKETS, nbytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
    """A version for scripted engines: as many tensors as buckets, each of one bucket's bytes."""
    for index in range(buckets):
        yield f"layer.{index}", torch.full((nbytes // 4,), version + index / 64, dtype=torch.float32)


def weights_of(model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A version for SGLang: the tensors of a model's folder, a little larger from version to version."""
    for name, tensor in load_file(Path(model, "model.safetensors")).items():
        yield name, tensor * (1 + version / 1024)


class Worker:
    """A process with workers of the scripted engine, or with one of SGLang's if there is a `model`."""

    def __init__(self, url: str, *, count: int = 1, model: str = "", **config: Any) -> None:
        self.pipe, theirs = _start.Pipe()
        told = {"redis_url": url, "pool": POOL, "drain_s": 1.0, **config}
        self.process = _start.Process(target=_work, args=(theirs, told, count, model), daemon=False)
        self.process.start()
        theirs.close()
        self.ids: list[str] = []

    def up(self, timeout_s: float = 240.0) -> Worker:
        """Wait until all of them have joined."""
        if not self.pipe.poll(timeout_s):
            raise SystemExit("a worker did not start")
        self.ids = self.pipe.recv()
        return self

    def family(self) -> list[psutil.Process]:
        """The process, and those that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def scheduler(self) -> psutil.Process:
        """SGLang's process that runs the model: the largest of them."""
        return max(self.family()[1:], key=lambda one: one.memory_info().rss)

    def end(self) -> None:
        """Kill it and what it has started."""
        for one in self.family():
            send(one, signal.SIGCONT)
            send(one, signal.SIGKILL)
        self.process.join()


_talks: weakref.WeakSet[Talk] = weakref.WeakSet()


def _work(pipe: Any, told: dict[str, Any], count: int, model: str) -> None:
    torch.set_num_threads(1)
    make = Talk.__init__

    def noted(talk: Talk, sock: Any) -> None:
        make(talk, sock)
        _talks.add(talk)

    Talk.__init__ = noted  # type: ignore[method-assign]
    asyncio.run(_serve(pipe, told, count, model))


async def _serve(pipe: Any, told: dict[str, Any], count: int, model: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from rolloutmq.worker.config import WorkerConfig
    from rolloutmq.worker.scripted import ScriptedEngine
    from rolloutmq.worker.text import NoTokenizer
    from rolloutmq.worker.worker import Worker as Real

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * count + 8))
    config, engines = WorkerConfig(**told), list[Any]()
    if model:
        from rolloutmq.worker.sglang.config import SGLangConfig
        from rolloutmq.worker.sglang.engine import SGLangEngine

        engines = [SGLangEngine(SGLangConfig(model=model, max_running=4))]
    else:
        engines = [ScriptedEngine() for _ in range(count)]
    workers = [Real(config, engine, NoTokenizer()) for engine in engines]
    serving = [asyncio.create_task(worker.run()) for worker in workers]
    await asyncio.gather(*(worker.joined.wait() for worker in workers))
    pipe.send([worker.worker_id for worker in workers])
    threading.Thread(target=_listen, args=(pipe,), daemon=True).start()
    await asyncio.wait(serving)


def _listen(pipe: Any) -> None:
    """At each word break every connection over which versions come."""
    with contextlib.suppress(EOFError, OSError):
        while pipe.recv():
            for talk in list(_talks):
                talk.close()


class Watch:
    """Reads the stream of reports: when each worker had each version, verified. Epochs are those of one publisher."""

    def __init__(self, url: str) -> None:
        self.had: dict[tuple[int, str], float] = {}
        self._redis = redis.Redis.from_url(url)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        last = "0"
        while not self._ended.is_set():
            answer: Any = self._redis.xread({f"rmq:{{{POOL}}}:transfers": last}, count=512, block=100)
            for entry, fields in answer[0][1] if answer else ():
                last = entry.decode()
                key = int(fields[b"epoch"]), fields[b"worker"].decode()
                if b'"ok":true' in fields[b"report"]:
                    self.had.setdefault(key, int(last.split("-")[0]) / 1000)

    def delays(self, epoch: int, since: float, workers: Sequence[str]) -> list[float]:
        """Seconds from `since` (time.time) until each of these had it, those that have it."""
        return [self.had[epoch, worker] - since for worker in workers if (epoch, worker) in self.had]

    def wait(self, epoch: int, workers: Sequence[str], timeout_s: float) -> bool:
        """Whether all of these have it within `timeout_s`."""
        until = time.monotonic() + timeout_s
        while any((epoch, worker) not in self.had for worker in workers):
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._redis.close()


class Fleet:
    """Redis, a publisher, and the watch, until the block is left. Versions and epochs have the same numbers.

    model: the folder of SGLang's model; scripted engines without.
    """

    def __init__(self, model: str = "") -> None:
        self._server, self._model = EmbeddedRedis(), model

    def __enter__(self) -> Fleet:
        self.url = self._server.__enter__().url
        self.admin: Any = redis.Redis.from_url(self.url)
        self.publisher = WeightPublisher(self.url, POOL, bucket_bytes=BUCKET_BYTES)
        self.watch = Watch(self.url)
        self.version, self.workers = 0, list[Worker]()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()
        self.publisher.close()
        self.watch.close()
        self.admin.close()
        self._server.__exit__(None, None, None)

    def start(self, number: int, **config: Any) -> list[Worker]:
        """So many processes more, all joined."""
        made = [Worker(self.url, model=self._model, **config) for _ in range(number)]
        self.workers += made
        return [worker.up() for worker in made]

    def publish(self, **shape: int) -> tuple[int, float, Any]:
        """Publish the next version. Returns its number, when `publish` was called (time.time), and its handle."""
        self.version += 1
        tensors = list(weights_of(self._model, self.version) if self._model else weights(self.version, **shape))
        began = time.time()
        return self.version, began, self.publisher.publish(self.version, iter(tensors))

    def below(self, worker: str, *, deep: bool = True) -> set[str]:
        """The workers that take, or took, the newest version from this one; deep: and from those."""
        sender: Any = self.publisher._sender
        found: set[str] = set()
        for outgoing in list(sender._hub._outgoing.values()):
            known, names = outgoing.sources._known, [f"{worker}/0"]
            while names:
                its = known.get(names.pop())
                if its is not None:
                    names += its.below if deep else ()
                    found |= {name.rpartition("/")[0] for name in its.below}
        return found

    def cpu_s(self) -> float:
        """CPU seconds of Redis so far."""
        return busy_s(self.admin.info("cpu"))


def p(values: Sequence[float], share: float) -> float:
    """The percentile, in milliseconds; 0 of no values."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else 0.0


def middle(values: Sequence[float]) -> float:
    """The median, in milliseconds; 0 of no values."""
    return round(1000 * statistics.median(values), 1) if values else 0.0


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(process.pid, number)
