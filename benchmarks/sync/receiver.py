"""A receiver's process of `python -m benchmarks sync`: one engine, and every path for weights into it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rolloutmq.messages.errors import WeightSyncError
from rolloutmq.sync.transfer import TransferOrder, TransferReport
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.sglang import SGLangConfig

from .child import now, serve
from .figures import stall_ms, steps
from .load import Load
from .loader import BenchEngine
from .pool import PoolMember
from .raw import Raw
from .stock import StockReceiver, StockRequest


class EngineProcess:
    """State of the process. Every public method is a call of the parent's."""

    raw: Raw
    _stock: StockReceiver

    def __init__(self) -> None:
        self._engine: BenchEngine | None = None
        self._requests: dict[str, list[StockRequest]] = {}
        self._load: Load | None = None
        self._member: PoolMember | None = None
        self._version = 0

    @property
    def engine(self) -> BenchEngine:
        if self._engine is None:
            raise RuntimeError("the engine has not been started")
        return self._engine

    async def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Start the engine. Returns the seconds it took and what it is."""
        began = now()
        self._engine = BenchEngine(SGLangConfig(**config))
        await self._engine.start()
        info = self._engine.info
        return {
            "seconds": now() - began,
            "version": info.version,
            "device": info.device,
            "context": info.context_length,
        }

    def raw_open(self, **where: Any) -> None:
        """Join the group of raw broadcasts."""
        self.raw = Raw(**where)

    async def stock_join(self, name: str, **where: Any) -> None:
        """Join the stock update group."""
        self._stock = StockReceiver(self.engine.manager, name)
        await self._stock.join(**where)

    async def stock_learn(self, key: str, requests: list[StockRequest]) -> None:
        """Remember the requests that `stock` sends under this name."""
        self._requests[key] = requests

    async def stock(self, key: str, timeout_s: float) -> Any:
        """Receive a version, from the first request until the device is done.

        Running requests are interrupted first.
        """
        began = now()
        if self._load is not None:
            await self._load.pause(timeout_s)
        await self._stock.receive(self._requests[key], timeout_s=timeout_s, after=self.engine.settle)
        ended = now()
        if self._load is not None:
            self._load.resume()
        return began, ended

    async def ours(self, order: dict[str, Any]) -> dict[str, Any]:
        """Receive a version by the order, from the first request until the device is done."""
        wanted = TransferOrder.from_dict(order)
        marks = [now()]
        first = _good(await self.engine.prepare_weights(wanted))
        marks.append(now())
        if self._load is not None and wanted.mode == "resume":
            await self._load.pause(wanted.timeout_s)
        second = _good(await self.engine.commit_weights(wanted))
        marks.append(now())
        self._version = wanted.version
        if self._load is not None:
            self._load.version = wanted.version
            self._load.resume()
        phases = {
            "prepare": marks[1] - marks[0],
            "prepare.rendezvous": first.rendezvous_s,
            "prepare.receive": first.receive_s,
            "commit": marks[2] - marks[1],
            "commit.load": second.load_s,
        }
        return {
            "span": (marks[0], marks[2]),
            "staged": first.phase == "staged",
            "readback": second.readback,
            "phases_ms": {name: seconds * 1e3 for name, seconds in phases.items()},
        }

    async def load_start(self, running: int, prompt: int, new: int, timeout_s: float) -> None:
        """Make the engine busy. Returns when every request that streams has some tokens."""
        self._load = Load(self.engine, running, prompt=prompt, new=new, version=self._version)
        await self._load.seen(16, timeout_s)

    async def load_stall(self, span: tuple[float, float], each: int, timeout_s: float) -> dict[str, float]:
        """Return the effect of an update during `span` on the streams."""
        assert self._load is not None
        await self._load.seen(each, timeout_s)
        step = steps([[moment for moment in stream if moment < span[0]] for stream in self._load.arrivals])
        return {"stall_ms": stall_ms(self._load.arrivals, span, step, slack_s=2 * step), "step_ms": step * 1e3}

    async def load_stop(self, timeout_s: float) -> None:
        """Make it idle again."""
        load, self._load = self._load, None
        if load is not None:
            await load.stop(timeout_s)

    async def serve_pool(self, redis_url: str, pool: str, max_running: int, timeout_s: float) -> float:
        """Join a pool with this engine, which is up already. Returns when it began."""
        self._member = PoolMember(self.engine, WorkerConfig(redis_url=redis_url, pool=pool, max_running=max_running))
        began = now()
        await self._member.join(timeout_s)
        return began

    async def pool_version(self, version: int, timeout_s: float) -> float:
        """Wait for `version` or a newer one. Returns when it was loaded here."""
        assert self._member is not None
        return await self._member.loaded(version, timeout_s)

    async def leave_pool(self, timeout_s: float) -> None:
        """Leave the pool. The engine stays up."""
        member, self._member = self._member, None
        if member is not None:
            await member.leave(timeout_s)

    async def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            with suppress(Exception):
                await self._engine.close()


def _good(report: TransferReport) -> TransferReport:
    if not report.ok:
        raise WeightSyncError(f"{report.phase}: {report.error}")
    return report


if __name__ == "__main__":
    process = EngineProcess()
    serve(process, process.close)
