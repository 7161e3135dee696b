"""The processes of one shape's measurement, and one update over each path.

A process that misses a deadline is ended. Then the next step starts all of them again, because after a broken process
group figures would not be comparable.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import ConfigError, RolloutMQError

from .child import Child, ChildFailed
from .figures import Span, span_ms
from .shapes import Shape

PACKAGE = __package__ or ""
START_S = 240.0
STEP_S = 25.0
MOST_LIVES = 4
FIRST_VERSION = 1_000_000
"""The first of the versions that go to the engine directly. Those of a pool begin at 1."""
MIB = 1 << 20


class Session:
    """A trainer on device 0, and receiver i on device 1 + i ("same": on device 0, too), each a process of its own."""

    def __init__(self, shape: Shape, folder: Path, *, device: str, count: int, running: int, graphs: bool) -> None:
        """folder: for the model's configuration. count: receivers. running: requests in a busy engine. graphs: CUDA
        graphs."""
        self.shape, self.device, self.count, self.running = shape, device, count, running
        self._graphs = graphs
        self.facts: dict[str, Any] = {}
        self._folder = folder
        self._children: list[Child] = []
        self._opened: set[str] = set()
        self._version = FIRST_VERSION
        self._lives = 0

    @property
    def trainer(self) -> Child:
        """The process that sends."""
        return self._children[0]

    @property
    def receivers(self) -> list[Child]:
        """The processes that receive."""
        return self._children[1:]

    async def ensure(self) -> bool:
        """Start the processes unless all of them run. Returns whether that was necessary.

        Raises what a start raised.
        """
        if self._children and all(child.alive for child in self._children):
            return False
        await self.close()
        if self._lives == MOST_LIVES:
            raise ConfigError(f"the processes had to be started {MOST_LIVES} times already")
        self._lives += 1
        self.shape.write(self._folder)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        environment = {"TOKENIZERS_PARALLELISM": "false"} | hidden
        trainer = Child(f"{PACKAGE}.trainer", "trainer", environment)
        receivers = [Child(f"{PACKAGE}.receiver", f"receiver {i}", environment) for i in range(self.count)]
        self._children = [trainer, *receivers]
        for child in self._children:
            await child.start()
        opened, *engines = await together(
            trainer.call("open", START_S, shape=self.shape.name, device=self._device_of(0)),
            *(child.call("start", START_S, config=self._config(i)) for i, child in enumerate(receivers)),
        )
        self.facts |= opened
        self.facts |= {"engine": engines[0]["version"], "engine_start_s": round(engines[0]["seconds"], 1)}
        return True

    async def close(self) -> None:
        """End all processes."""
        children, self._children = self._children, []
        self._opened.clear()
        await asyncio.gather(*(child.close() for child in children))

    # --- one update over one path, "name" or "name:variant" ----------------------------------------------------------

    async def update(self, path: str, *, mode: str = "resume") -> float:
        """Run one update, and return its milliseconds. The first one of a path also sets up its group and warms it up.

        Raises ChildFailed or WaitTimeout.
        """
        return span_ms((await self.update_spans(path, mode=mode))[0])

    async def update_spans(self, path: str, *, mode: str = "resume") -> tuple[list[Span], list[dict[str, Any]]]:
        """Run one update. Returns its start and end at every receiver, and the receivers' reports."""
        await self.ensure()
        name, _, variant = path.partition(":")
        if name.startswith("ours"):
            return await self._ours(variant, mode=mode, verify=name == "ours")
        size = int(variant) * MIB if variant else None
        try:
            return await (self._raw(size or self.facts["nbytes"]) if name == "raw" else self._stock(path, size)), []
        except RolloutMQError:
            await self.close()  # its group cannot be used for another figure, and SGLang's own has no way out of it
            raise

    async def _open(self, what: str, trainer: Awaitable[Any], *receivers: Awaitable[Any]) -> None:
        await together(trainer, *receivers)
        self._opened.add(what)

    async def _raw(self, bucket_bytes: int) -> list[Span]:
        if "raw" not in self._opened:
            where = {"name": f"raw-{self._lives}", "world": self.count + 1, "timeout_s": STEP_S}
            await self._open(
                "raw",
                self.trainer.call("raw_open", 2 * STEP_S, **where),
                *(
                    child.call("raw_open", 2 * STEP_S, rank=1 + i, device=self._device_of(1 + i), **self._at, **where)
                    for i, child in enumerate(self.receivers)
                ),
            )
        nbytes = self.facts["nbytes"]
        size = {"nbytes": nbytes, "bucket_bytes": min(bucket_bytes, nbytes), "timeout_s": STEP_S}
        _, *spans = await together(*(child.call("raw.run", 2 * STEP_S, **size) for child in self._children))
        return spans

    async def raw_done(self) -> None:
        """Give the memory of raw broadcasts back."""
        if "raw" in self._opened:
            await together(*(child.call("raw.free", STEP_S) for child in self._children))

    async def _stock(self, path: str, bucket_bytes: int | None) -> list[Span]:
        if "stock" not in self._opened:
            name, world = f"stock{self._lives}", self.count + 1
            backend = "gloo" if self.device == "cpu" else "nccl"
            where = {"name": name, "world": world, "backend": backend, "timeout_s": STEP_S, **self._at}
            await self._open(
                "stock",
                self.trainer.call("stock_open", 2 * STEP_S, name=name, world=world, timeout_s=STEP_S),
                *(
                    child.call("stock_join", 2 * STEP_S, rank_offset=1 + i, **where)
                    for i, child in enumerate(self.receivers)
                ),
            )
        if path not in self._opened:
            requests = await self.trainer.call("stock_requests", STEP_S, bucket_bytes=bucket_bytes)
            await together(*(c.call("stock_learn", STEP_S, key=path, requests=requests) for c in self.receivers))
            self._opened.add(path)
        _, *spans = await together(
            self.trainer.call("stock_send", 2 * STEP_S, bucket_bytes=bucket_bytes, timeout_s=STEP_S),
            *(child.call("stock", 2 * STEP_S, key=path, timeout_s=STEP_S) for child in self.receivers),
        )
        return spans

    async def _ours(self, variant: str, *, mode: str, verify: bool) -> tuple[list[Span], list[dict[str, Any]]]:
        if "ours" not in self._opened:
            facts = await self.trainer.call("ours_open", START_S, timeout_s=STEP_S)
            self.facts |= {f"trainer_{what}_ms": round(facts[f"{what}_s"] * 1e3, 2) for what in ("pack", "digest")}
            self._opened.add("ours")
        if fresh := f"staging:{variant}" not in self._opened:
            policy = "off" if variant == "direct" else "on"
            await together(*(child.call("engine.stage", STEP_S, policy=policy) for child in self.receivers))
            self._opened -= {opened for opened in self._opened if opened.startswith("staging:")}
            self._opened.add(f"staging:{variant}")
        self._version += 1
        order = await self.trainer.call(
            "ours.announce",
            STEP_S,
            epoch=self._version,
            workers=self._names,
            mode=mode,
            verify=verify,
            timeout_s=STEP_S,
        )
        orders = [order | {"worker": name} for name in self._names]
        _, *reports = await together(
            self.trainer.call("ours.send", 2 * STEP_S, workers=self._names, timeout_s=STEP_S),
            *(child.call("ours", 2 * STEP_S, order=one) for child, one in zip(self.receivers, orders, strict=True)),
        )
        if fresh:  # buffers and bindings were made just now, and are not measured
            return await self._ours(variant, mode=mode, verify=verify)
        return [report["span"] for report in reports], reports

    # --- under load --------------------------------------------------------------------------------------------------

    async def stall(self, path: str, *, mode: str, each: int = 16) -> tuple[float, float]:
        """Return milliseconds without a token around an update of busy engines (the worst one), and of a usual step."""
        await self.ensure()
        try:
            await self._load_start()
            _, reports = spans_of = await self.update_spans(path, mode=mode)
            # Only the commit should stall, because engines serve during prepare. The measurement covers both.
            spans = [report["span"] for report in reports] or spans_of[0]
            found = await together(
                *(
                    child.call("load_stall", 2 * STEP_S, span=span, each=each, timeout_s=STEP_S)
                    for child, span in zip(self.receivers, spans, strict=True)
                )
            )
        finally:
            await self._load_stop()
        return max(one["stall_ms"] for one in found), statistics.median(one["step_ms"] for one in found)

    async def _load_start(self) -> None:
        room = self.shape.kv_tokens // self.running - 80
        load = {"running": self.running, "prompt": 64, "new": min(room, 900), "timeout_s": START_S}
        # Kernels are compiled at the first request.
        calls = (child.call("load_start", 2 * START_S, **load) for child in self.receivers)
        await together(*calls)

    async def _load_stop(self) -> None:
        if all(child.alive for child in self._children):
            await together(*(child.call("load_stop", 2 * STEP_S, timeout_s=STEP_S) for child in self.receivers))

    # --- how it is set up --------------------------------------------------------------------------------------------

    @property
    def _names(self) -> list[str]:
        """The receivers, as the sender knows them. An engine that was started again is another one."""
        return [f"receiver-{self._lives}-{number}" for number in range(self.count)]

    @property
    def _at(self) -> dict[str, Any]:
        return {"host": self.facts["host"], "port": self.facts["port"]}

    def _device_of(self, number: int) -> str:
        return {"cpu": "cpu", "same": "cuda:0"}.get(self.device, f"cuda:{number}")

    def _config(self, receiver: int) -> dict[str, Any]:
        """Return the SGLangConfig of a receiver's engine."""
        config: dict[str, Any] = {
            "model": str(self._folder),
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_running": self.running,
            "max_total_tokens": self.shape.kv_tokens,
            "random_seed": 1,
        }
        if self.device == "cpu":
            return config
        return config | {
            "mem_fraction": 0.5,  # the rest is for staging, and for the copies that stock makes
            "prefill_cuda_graph": False,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "cuda_graph": self._graphs,
            "extra": {"base_gpu_id": 0 if self.device == "same" else 1 + receiver, "port": 31000 + 1000 * receiver},
        }


async def together(*calls: Awaitable[Any]) -> list[Any]:
    """Return all results. Each call keeps its own deadline.

    Raises the first error once all have ended. An error with a cause goes before a child's that is only gone.
    """
    ended = await asyncio.gather(*calls, return_exceptions=True)
    errors = [error for error in ended if isinstance(error, BaseException)]
    if errors:
        telling = [error for error in errors if not (isinstance(error, ChildFailed) and str(error).endswith("ended"))]
        raise (telling or errors)[0]
    return list(ended)
