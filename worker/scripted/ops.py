"""The scripted engine's rarer duties: the same state machine as SGLang's, with the same ways to be hurt.

As with SGLang: giving memory up while a request runs, or a request while memory is given up, ends the engine; a frozen
engine answers nothing until it goes on, not even an abort; woken weights are no version unless a copy was kept.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...messages.errors import EngineDead, EngineError, InvalidField, RequestRefused, RolloutMQError

KEEP_ALL = 1 << 30


class ScriptedOps:
    """State of one engine, a ScriptedEngine.

    keeps_weights: sleeping weights wake as they were. can_sleep: whether it can give memory up at all.
    """

    def __init__(self, engine: Any) -> None:
        self.keeps_weights, self.can_sleep = False, True
        self.asleep: set[str] = set()
        self.garbage = False
        self.flushes = 0
        self.receiver: Any = None
        self._engine = engine
        self._frozen_at: float | None = None
        self._lost_s = 0.0
        self._froze, self._thawed = asyncio.Event(), asyncio.Event()
        self._profile: Path | None = None

    def clock(self) -> float:
        """Seconds in which requests got on."""
        return (time.monotonic() if self._frozen_at is None else self._frozen_at) - self._lost_s

    def check(self) -> None:
        """A request comes. Raises EngineDead where SGLang would crash, or sample from nothing."""
        if self.asleep or self.garbage:
            self._engine.kill()  # what its scheduler's assertions do to SGLang
            raise EngineDead(f"a request came to an engine that cannot serve: {self.asleep or 'its weights'}")

    async def wait(self, seconds: float, *events: asyncio.Event) -> bool:
        """Until one of `events`, True; or until `seconds` of the clock are over. Nothing ends while it is frozen."""
        end = self.clock() + seconds
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            while True:
                turn = asyncio.create_task((self._thawed if self.frozen else self._froze).wait())
                left = None if self.frozen else max(0.0, end - self.clock())
                try:
                    await asyncio.wait([turn, *waits], timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    turn.cancel()
                if self.frozen and not waits[-1].done():  # the last one is its death
                    continue
                if any(wait.done() for wait in waits):
                    return True
                if self.clock() >= end:
                    return False
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def frozen(self) -> bool:
        """Whether it stands still."""
        return self._frozen_at is not None

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Engine.operate."""
        known: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "flush_cache": self._flush_cache,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "sleep": self._sleep,
            "wake": self._wake,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "kv_use": lambda _: {"tokens": 8192, "used": 64 * len(self._engine._running)},
            "generated": lambda _: {"requests": self.generated()},
        }
        await asyncio.sleep(0)
        if operation in known:
            return known[operation](params)
        if operation == "parameter":
            return self._parameter(params)
        if operation == "audit":
            return await asyncio.to_thread(self._audit, params)
        if operation == "export":
            return await asyncio.to_thread(self._export, params)
        raise RequestRefused(f"{operation}: the scripted engine has nothing of the kind")

    def generated(self) -> list[str]:
        """The requests that have a token."""
        return [name for name in self._engine._running if self._engine._sampled(name)]

    def _flush_cache(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._engine._running:
            raise EngineError("the cache is not flushed while requests run")
        self.flushes += 1
        return {}

    def _freeze(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._frozen_at is None:
            self._frozen_at = time.monotonic()
            self._froze.set()
            self._thawed.clear()
        return {}

    def _thaw(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._frozen_at is not None:
            self._lost_s += time.monotonic() - self._frozen_at
            self._frozen_at = None
            self._froze.clear()
            self._thawed.set()
        return {}

    def _sleep(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if not self.can_sleep:
            raise RequestRefused("sleep: this engine was started without a memory saver")
        if params["tags"] and (self._engine._running or self.asleep & set(params["tags"])):
            self._engine.kill()
            raise EngineDead("memory was given up that was in use, or was not there")
        self.asleep |= set(params["tags"])
        return {}

    def _wake(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if not set(params["tags"]) <= self.asleep:
            self._engine.kill()
            raise EngineDead("memory was taken that was not given up")
        self.asleep -= set(params["tags"])
        if "weights" in params["tags"] and not self.keeps_weights:
            self.garbage = True
        return {"intact": not self.garbage}

    def _start_profile(self, params: Mapping[str, Any]) -> dict[str, Any]:
        self._profile = Path(params.get("folder") or tempfile.mkdtemp(prefix="rolloutmq-profile-"))
        self._profile.mkdir(parents=True, exist_ok=True)
        return {"folder": str(self._profile), "activities": ["CPU"]}

    def _stop_profile(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._profile is None:
            raise RequestRefused("stop_profile: no profile was started")
        trace, self._profile = self._profile / "scripted.trace.json", None
        trace.write_text(json.dumps({"traceEvents": []}))
        return {"folder": str(trace.parent), "files": {trace.name: trace.stat().st_size}}

    def _audit(self, params: Mapping[str, Any]) -> dict[str, Any]:
        from ...sync.tensors import digest  # noqa: PLC0415

        weights, most = dict(self._engine.weights), int(params["names"])
        if params["only"]:
            weights = {name: weights[name] for name in params["only"]}
        values = {name: digest(tensor.contiguous()) for name, tensor in weights.items()}
        wrong, compared, why = [], 0, "nothing was received"
        if self.receiver is not None:
            try:
                with self.receiver.lending(int(params["version"])) as (manifest, _):
                    specs, why = manifest.tensors, ""
                specs = [spec for spec in specs if not params["only"] or spec.name in params["only"]]
                wrong = [spec.name for spec in specs if values.get(spec.name) != spec.digest]
                compared = len(specs)
            except RolloutMQError as reason:
                why = str(reason)
        found = {
            "nan": [n for n, t in weights.items() if bool(t.isnan().any())],
            "inf": [n for n, t in weights.items() if bool(t.isinf().any())],
            "zero": [n for n, t in weights.items() if t.dim() > 1 and t.numel() and not bool(t.any())],
            "wrong": wrong,
        }
        return {
            "parameters": len(weights),
            "nbytes": sum(tensor.nbytes for tensor in weights.values()),
            "fingerprint": json.dumps(sorted(values.items())),
            **{kind: names[:most] for kind, names in found.items()},
            "compared": compared,
            "found": {kind: len(names) for kind, names in found.items()},
            "not_compared": why,
        }

    def _parameter(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if (tensor := self._engine.weights.get(params["name"])) is None:
            raise InvalidField("name", params["name"], f"one of {', '.join(self._engine.weights)}")
        values = tensor[: params["truncate_size"]].tolist()
        return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "values": values, "rank": 0, "ranks": 1}

    def _export(self, params: Mapping[str, Any]) -> dict[str, Any]:
        from ...sync.disk import FILE_BYTES, SnapshotStore  # noqa: PLC0415
        from ...sync.packing import PackedWeights  # noqa: PLC0415

        if not self._engine.weights:
            raise EngineError("the scripted engine has received no weights")
        snapshot = PackedWeights(int(params["version"]), dict(self._engine.weights), keep="host").snapshot()
        path = SnapshotStore(params["path"], keep=KEEP_ALL, file_bytes=params.get("max_size") or FILE_BYTES).save(
            snapshot
        )
        return {"path": str(path), "tensors": len(snapshot.manifest.tensors), "nbytes": snapshot.manifest.nbytes}
