"""`python -m benchmarks sync`: how fast weights get from a trainer into engines, over every path, in one run.

benchmarks/README.md says what is measured. A path that fails is reported with its error, and has no figure.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import ConfigError, RolloutMQError
from rolloutmq.ops.redis import EmbeddedRedis

from ..harness import Run, names, option, turns
from .figures import ratios, span_ms, summary
from .session import START_S, STEP_S, Session, together
from .shapes import SHAPES, Shape

PATHS = ("raw", "stock_tensor", "stock_bucket", "ours", "ours_unverified")
EXTRAS = ("stall", "pool")
SAME = ("ours", "ours_unverified", "stall", "pool", "handles")
"""What there is on one GPU, where NCCL connects nothing: buckets are handed over by CUDA IPC."""
VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "cpu": {"raw": (1, 16), "stock_bucket": (1, 16), "ours": ("staged",), "ours_unverified": ("staged",)},
    "cuda": {
        "raw": (256, 1024),
        "stock_bucket": (256, 512, 1024),
        "ours": ("direct", "staged"),
        "ours_unverified": ("direct", "staged"),
    },
    "same": {"ours": ("staged",), "ours_unverified": ("staged",)},
}
"""Path -> variants: MiB of a buffer, or how a version is received: `direct` while it is loaded, or `staged` beside the
one that serves."""
REPEATS = 3
NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "ours_publish_ms", "stall_ms", "stall_overlapped_ms", "stall_resume_ms", "stall_stock_ms",
        "first_sync_ms", "regroup_ms", "late_join_ms",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    shapes: str = option("", "Some of tiny,tiny-moe,0.6b,4b,8b,moe. Default: tiny on a CPU, else 0.6b,8b,moe.")
    paths: str = option("", f"Some of {','.join(PATHS + EXTRAS)},handles. Default: all that the device has.")
    receivers: int = option(1, "Engines, each on a GPU of its own.", min=1)
    rounds: int = option(8, "Updates over each path, in turns; the median counts.", min=1)
    running: int = option(0, "Requests in a busy engine. Default: 64, on a CPU 16.", min=0)
    device: str = option("auto", "auto (GPUs, if there are two), cpu, cuda, or same: one GPU for trainer and engine.")
    graphs: bool = option(True, "Decode with CUDA graphs; without, engines start sooner.")

    def wanted(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the paths that are known, in their order."""
        return tuple(path for path in known if path in self.paths.split(","))


def settled(plan: Plan) -> Plan:
    """The plan without defaults. Raises ConfigError for unknown names, and for more GPUs than there are."""
    import torch

    gpus, device = torch.cuda.device_count(), plan.device
    if device not in ("auto", *VARIANTS):
        raise ConfigError(f"--device {device!r}: auto, {', '.join(VARIANTS)}")
    if device == "auto":
        device = "cuda" if gpus > 1 else "cpu"
    if device == "cuda" and plan.receivers + 1 > gpus:
        needed = plan.receivers + 1
        raise ConfigError(f"--receivers {plan.receivers}: with the trainer that takes {needed} GPUs, {gpus} are here")
    if device == "same" and (plan.receivers > 1 or not gpus):
        raise ConfigError(f"--device same, --receivers {plan.receivers}: 1, on the trainer's GPU; {gpus} are here")
    known = SAME if device == "same" else PATHS + EXTRAS
    shapes = plan.shapes or ("tiny" if device == "cpu" else "0.6b,8b,moe")
    return replace(
        plan,
        device=device,
        shapes=",".join(names("--shapes", shapes, SHAPES)),
        paths=",".join(names("--paths", plan.paths or ",".join(known), known)),
        running=plan.running or (16 if device == "cpu" else 64),
    )


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Weights from a trainer into engines: raw broadcast, SGLang's own ways and ours, stalls, joins.

    An error of a single path is not raised.
    """
    plan, began = settled(plan), time.monotonic()
    results: dict[str, Any] = {"device": plan.device, "receivers": plan.receivers, "rounds": plan.rounds, "shapes": {}}
    asyncio.run(_measure(plan, run, results))
    return results | {"seconds": round(time.monotonic() - began, 1)}


async def _measure(plan: Plan, run: Run, results: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shapes = [SHAPES[name] for name in plan.shapes.split(",")]
        for shape in shapes:
            work = _Work(plan, run, results, shape=shape, folder=Path(folder))
            try:
                for step in STEPS:
                    await work.do(step)
            finally:
                await work.session.close()


class _Work:
    """One shape: its processes and its results."""

    def __init__(self, plan: Plan, run: Run, results: dict[str, Any], *, shape: Shape, folder: Path) -> None:
        self.plan, self.paths, self._run, self._results = plan, plan.wanted(PATHS), run, results
        self.figures: dict[str, Any] = {"nbytes": shape.nbytes, "tensors": len(list(shape.tensors())), "errors": {}}
        rounds: dict[str, list[float]] = {}
        self.figures |= {"rounds": rounds, **summary(shape.nbytes, rounds, self.paths), **NOTHING}
        results["shapes"][shape.name] = self.figures
        own = folder / shape.name
        own.mkdir()
        engines: Any = {"device": plan.device, "count": plan.receivers, "running": plan.running}
        self.session = Session(shape, own, graphs=plan.graphs, **engines)

    async def do(self, step: str) -> None:
        """Run one of STEPS, if it is wanted."""
        if step != "paths" and step not in self.plan.wanted(tuple(STEPS)):
            return
        self.say(f"{self.figures['nbytes'] / 1e9:.2f} GB, {self.figures['tensors']} tensors: {step}")
        try:
            await STEPS[step](self)
        except (RolloutMQError, TimeoutError, OSError) as error:
            self.failed(step, error)
        self.keep({key: value for key, value in self.session.facts.items() if key not in ("host", "port")})

    def say(self, text: str) -> None:
        self._run.say(time.strftime("%H:%M:%S"), f"{self.session.shape.name}:", text)

    def keep(self, found: dict[str, Any]) -> None:
        """More figures."""
        self.figures |= found
        self.figures |= ratios(self.figures)
        self._run.keep(self._results)

    def failed(self, what: str, error: BaseException) -> None:
        self.figures["errors"][what] = f"{type(error).__name__}: {error}"
        self.say(f"{what} failed: {error}")


async def _paths(work: _Work) -> None:
    """Run rounds in turns. Another path begins each round, and the first update of a path is not counted."""
    plan, session, figures = work.plan, work.session, work.figures
    rounds, told = figures["rounds"], dict[str, list[dict[str, Any]]]()
    keys = [
        f"{path}:{variant}" if variant else path
        for path in work.paths
        for variant in VARIANTS[plan.device].get(path, ("",))
    ]
    for number, in_turn in [(-1, keys), *turns(keys, plan.rounds if keys else 0)]:
        for key in in_turn:
            if key in figures["errors"]:
                continue
            try:
                spans, reports = await session.update_spans(key)
                if number >= 0:
                    rounds.setdefault(key, []).append(round(span_ms(spans), 3))
                    told.setdefault(key, []).extend(reports)
            except ConfigError:
                raise
            except (RolloutMQError, TimeoutError, OSError) as error:
                work.failed(key, error)
                rounds.pop(key, None)
        if number < 0:
            work.say(f"every path is set up; engine start took {session.facts.get('engine_start_s')} s")
        else:
            work.say(f"round {number + 1}: " + ", ".join(f"{key} {times[-1]} ms" for key, times in rounds.items()))
            work.keep(summary(figures["nbytes"], rounds, work.paths))
    await session.raw_done()
    details = {key: _details(reports) for key, reports in told.items() if reports}
    work.keep(summary(figures["nbytes"], rounds, work.paths) | {"ours_details": details})


def _details(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the parts of RolloutMQ's own update times (medians), and whether they were staged and read back."""
    phases = reports[0]["phases_ms"]
    medians = {name: round(statistics.median(report["phases_ms"][name] for report in reports), 3) for name in phases}
    flags = {name: all(report[name] for report in reports) for name in ("staged", "readback")}
    return flags | {"phases_ms": medians}


STALLS = {
    "stall_ms": ("ours:direct", "in_place"),
    "stall_overlapped_ms": ("ours:staged", "in_place"),
    "stall_resume_ms": ("ours:staged", "resume"),
    "stall_stock_ms": ("stock_bucket:", "resume"),
}


async def _stalls(work: _Work) -> None:
    """Measure stalls, medians of a few updates. A CPU receives nothing directly, so `stall_ms` is left out there."""
    plan, session, figures = work.plan, work.session, work.figures
    details = figures.setdefault("stalls", {})
    for key, (given, mode) in STALLS.items():
        path = given
        name, _, variant = given.partition(":")
        if name not in work.paths or (variant and variant not in VARIANTS[plan.device][name]):
            continue
        if name == "stock_bucket":
            path += figures.get("stock_bucket_variant") or str(VARIANTS[plan.device][name][0])
        found = []
        try:
            await session.ensure()
            await session.update(path)  # sets up groups and buffers, which are not measured here
            for _ in range(REPEATS):
                found.append(await session.stall(path, mode=mode))
        except (RolloutMQError, TimeoutError, OSError) as error:
            work.failed(key, error)
            continue
        figures[key] = round(statistics.median(stall for stall, _ in found), 2)
        details[key] = {
            "rounds": [round(stall, 2) for stall, _ in found],
            "step_ms": round(statistics.median(step for _, step in found), 2),
            "running": plan.running,
            "path": path,
            "mode": mode,
        }
        work.say(f"{key} {figures[key]} (a step takes {details[key]['step_ms']} ms)")


async def _pool(work: _Work) -> None:
    """Measure `publish` with Redis, ledger and roster: first, later, and after a worker left and came again."""
    plan, session, figures = work.plan, work.session, work.figures
    await session.ensure()
    trainer, receivers = session.trainer, session.receivers
    try:
        with EmbeddedRedis() as server:
            where = {"redis_url": server.url, "pool": "bench"}
            joins = {"max_running": plan.running, "timeout_s": STEP_S, **where}
            last = await trainer.call("publisher_open", STEP_S, timeout_s=STEP_S, **where)
            await together(*(child.call("serve_pool", 2 * STEP_S, **joins) for child in receivers))

            async def publish() -> float:
                nonlocal last
                last += 1
                report = await trainer.call("publish", START_S, version=last, timeout_s=2 * STEP_S)
                if report["state"] != "committed" or report["workers"] != len(receivers):
                    raise RolloutMQError(f"version {last} became {report['state']}: {report['failures']}")
                return float(report["ms"])

            figures["first_sync_ms"] = round(await publish(), 2)
            later = [round(await publish(), 3) for _ in range(max(2, plan.rounds))]
            figures["ours_publish_ms"] = round(statistics.median(later), 3)
            figures["publish_rounds"] = later
            await receivers[-1].call("leave_pool", 2 * STEP_S, timeout_s=STEP_S)
            began = await receivers[-1].call("serve_pool", 2 * STEP_S, **joins)
            loaded = await receivers[-1].call("pool_version", 2 * STEP_S, version=last, timeout_s=STEP_S)
            figures["late_join_ms"] = round((loaded - began) * 1e3, 2)
            figures["regroup_ms"] = round(await publish(), 2)
            work.say(
                f"publish {figures['ours_publish_ms']} ms (first {figures['first_sync_ms']}, after a change of members "
                f"{figures['regroup_ms']}); late join {figures['late_join_ms']} ms"
            )
            await together(*(child.call("leave_pool", 2 * STEP_S, timeout_s=STEP_S) for child in receivers))
            await trainer.call("publisher.close", STEP_S)
    except BaseException:
        await session.close()  # its processes may wait for this Redis, which is gone
        raise


async def _handles(work: _Work) -> None:
    """Measure how soon another process reads a bucket of this GPU."""
    from .handles import measure_handles  # torch

    await work.session.close()
    work.keep({"handles": await asyncio.to_thread(measure_handles, "cuda:0", work.plan.rounds)})


STEPS: dict[str, Callable[[_Work], Awaitable[None]]] = {
    "paths": _paths, "stall": _stalls, "pool": _pool, "handles": _handles
}  # fmt: skip
