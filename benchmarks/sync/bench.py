"""`python -m benchmarks sync`: how fast weights get from a trainer into engines, over every path, in one run.

benchmarks/README.md says what is measured. A path that fails is reported with its error, and has no figure.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import ConfigError, RolloutMQError
from rolloutmq.ops.files import check_out, writing
from rolloutmq.ops.redis import EmbeddedRedis

from .figures import ratios, span_ms, summary, table
from .session import START_S, STEP_S, Plan, Session, together
from .shapes import Shape, parse_shapes

PATHS = ("raw", "stock_tensor", "stock_bucket", "ours", "ours_unverified")
EXTRAS = ("stall", "tokens", "pool")
VARIANTS = {
    "cpu": {"raw": (1, 16), "stock_bucket": (1, 16), "ours": ("staged",), "ours_unverified": ("staged",)},
    "cuda": {
        "raw": (256, 1024),
        "stock_bucket": (256, 512, 1024),
        "ours": ("direct", "staged"),
        "ours_unverified": ("direct", "staged"),
    },
}
"""Path -> variants: MiB of a buffer, or how a version is received: `direct` while it is loaded, or `staged` beside the
one that serves."""
REPEATS = 3
NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "ours_publish_ms", "stall_ms", "stall_overlapped_ms", "stall_resume_ms", "stall_stock_ms", "tokens_kept",
        "tokens_s", "tokens_s_with_updates", "first_sync_ms", "regroup_ms", "late_join_ms",
    )
)  # fmt: skip


@dataclass(slots=True)
class _Run:
    plan: Plan
    say: Callable[[str], None]
    results: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Write the results so far, so that a run that is killed keeps them."""
        if self.plan.out is not None:
            with writing("--out", self.plan.out):
                self.plan.out.parent.mkdir(parents=True, exist_ok=True)
                part = self.plan.out.with_suffix(self.plan.out.suffix + ".part")
                part.write_text(json.dumps(self.results, indent=2) + "\n")
                part.replace(self.plan.out)


def make_plan(
    shapes: str | None, paths: str | None, device: str, receivers: int | None, running: int | None, **settings: Any
) -> Plan:
    """Make a plan of the command's options. Raises ConfigError for unknown names, and for more GPUs than there are."""
    import torch  # noqa: PLC0415

    gpus = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device!r}: auto, cpu or cuda")
    if device == "auto":
        device = "cuda" if gpus > 1 else "cpu"
    count = receivers or 1
    if device == "cuda" and count + 1 > gpus:
        raise ConfigError(f"--receivers {count}: with the trainer that takes {count + 1} GPUs, {gpus} are here")
    known = PATHS + EXTRAS
    wanted = tuple(path.strip() for path in paths.split(",")) if paths else known
    if strange := sorted(set(wanted) - set(known)):
        raise ConfigError(f"--paths {paths!r}: some of {', '.join(known)}, not {strange}")
    if settings.get("plain"):
        possible = ("raw", "ours", "ours_unverified")
        wanted = tuple(path for path in wanted if path in possible) if not paths else wanted
        if strange := sorted(set(wanted) - set(possible)):
            raise ConfigError(f"--paths {paths!r}: without engines there are {', '.join(possible)}, not {strange}")
    return Plan(
        shapes=parse_shapes(shapes or ("tiny" if device == "cpu" else "0.6b,8b,moe")),
        paths=tuple(path for path in PATHS if path in wanted),
        extras=tuple(extra for extra in EXTRAS if extra in wanted),
        device=device,
        receivers=count,
        running=running or (16 if device == "cpu" else 64),
        **settings,
    )


def run_sync_bench(plan: Plan, *, quiet: bool = False) -> dict[str, Any]:
    """Run it, print the result (as one line of JSON if `quiet`) and return it.

    An error of a single path is not raised.
    """
    if plan.out is not None:
        check_out("--out", plan.out)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {time.monotonic() - began:6.1f}s  {text}", file=sys.stderr, flush=True)

    run = _Run(plan, say)
    run.results = {
        "what": "python -m benchmarks sync: weights from a trainer's device into engines",
        "receivers": plan.receivers,
        "rounds": plan.rounds,
        "shapes": {},
        "host": describe(plan.device),
        "command": " ".join(["rolloutmq", *sys.argv[1:]]),
    }
    asyncio.run(_measure(run))
    run.results["seconds"] = round(time.monotonic() - began, 1)
    run.save()
    print(json.dumps(run.results) if quiet else table(run.results))
    return run.results


async def _measure(run: _Run) -> None:
    plan = run.plan
    with tempfile.TemporaryDirectory() as folder:
        works = [_Work(run, shape, Path(folder) / shape.name, number) for number, shape in enumerate(plan.shapes)]
        try:
            if plan.together:
                await asyncio.gather(*(work.session.ensure() for work in works), return_exceptions=True)
                for step in STEPS:
                    for work in works:
                        await work.do(step)
                return
            for work in works:
                for step in STEPS:
                    await work.do(step)
                await work.session.close()
        finally:
            await asyncio.gather(*(work.session.close() for work in works))
            run.save()


class _Work:
    """One shape: its processes and its results."""

    def __init__(self, run: _Run, shape: Shape, folder: Path, number: int) -> None:
        folder.mkdir()
        plan = run.plan
        self._run = run
        self.figures: dict[str, Any] = {"nbytes": shape.nbytes, "tensors": len(list(shape.tensors())), "errors": {}}
        rounds: dict[str, list[float]] = {}
        self.figures |= {"rounds": rounds, **summary(shape.nbytes, rounds, plan.paths), **NOTHING}
        run.results["shapes"][shape.name] = self.figures
        self.session = Session(shape, plan, folder, number)

    async def do(self, step: str) -> None:
        """Run one of STEPS, if it is wanted."""
        if step != "paths" and step not in self._run.plan.extras:
            return
        run, figures, session = self._run, self.figures, self.session
        run.say(f"{session.shape.name}, {figures['nbytes'] / 1e9:.2f} GB, {figures['tensors']} tensors: {step}")
        try:
            await STEPS[step](run, session, figures)
        except (RolloutMQError, TimeoutError, OSError) as error:
            _failed(run, figures, step, error)
        figures |= {key: value for key, value in session.facts.items() if key not in ("host", "port")}
        figures |= ratios(figures)
        run.save()


def _failed(run: _Run, figures: dict[str, Any], what: str, error: BaseException) -> None:
    figures["errors"][what] = f"{type(error).__name__}: {error}"
    run.say(f"{what} failed: {error}")


async def _paths(run: _Run, session: Session, figures: dict[str, Any]) -> None:
    """Run rounds in turns. Another path begins each round, and the first update of a path is not counted."""
    plan, rounds = run.plan, figures["rounds"]
    told: dict[str, list[dict[str, Any]]] = {}
    keys = [
        f"{path}:{variant}" if variant else path
        for path in plan.paths
        for variant in VARIANTS[plan.device].get(path, ("",))
    ]
    for number in range(-1, plan.rounds):
        turn = max(0, number) % max(1, len(keys))
        for key in [*keys[turn:], *keys[:turn]]:
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
                _failed(run, figures, key, error)
                rounds.pop(key, None)
        if number < 0:
            run.say(f"every path is set up; engine start took {session.facts.get('engine_start_s')} s")
        else:
            run.say(f"round {number + 1}: " + ", ".join(f"{key} {times[-1]} ms" for key, times in rounds.items()))
            figures |= summary(figures["nbytes"], rounds, plan.paths)
            run.save()
    await session.raw_done()
    figures |= summary(figures["nbytes"], rounds, plan.paths)
    figures["ours_details"] = {key: _details(reports) for key, reports in told.items() if reports}
    rates = [f"{path} {figures[f'{path}_gb_s']} GB/s" for path in plan.paths if figures[f"{path}_gb_s"] is not None]
    run.say(f"{plan.rounds} rounds: " + ", ".join(rates))


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


async def _stalls(run: _Run, session: Session, figures: dict[str, Any]) -> None:
    """Measure stalls, medians of a few updates. A CPU receives nothing directly, so `stall_ms` is left out there."""
    details = figures.setdefault("stalls", {})
    for key, (given, mode) in STALLS.items():
        path = given
        name, _, variant = given.partition(":")
        if name not in run.plan.paths or (variant and variant not in VARIANTS[run.plan.device][name]):
            continue
        if name == "stock_bucket":
            path += figures.get("stock_bucket_variant") or str(VARIANTS[run.plan.device][name][0])
        found = []
        try:
            await session.ensure()
            await session.update(path)  # sets up groups and buffers, which are not measured here
            for _ in range(REPEATS):
                found.append(await session.stall(path, mode=mode))
        except (RolloutMQError, TimeoutError, OSError) as error:
            _failed(run, figures, key, error)
            continue
        figures[key] = round(statistics.median(stall for stall, _ in found), 2)
        details[key] = {
            "rounds": [round(stall, 2) for stall, _ in found],
            "step_ms": round(statistics.median(step for _, step in found), 2),
            "running": run.plan.running,
            "path": path,
            "mode": mode,
        }
        run.say(f"{key} {figures[key]} (a step takes {details[key]['step_ms']} ms)")


async def _tokens(run: _Run, session: Session, figures: dict[str, Any]) -> None:
    """Measure tokens/s without updates, then with them, in place and staged."""
    if "ours" not in run.plan.paths:
        return
    path, mode = "ours:staged", "in_place"
    await session.ensure()
    await session.update(path)
    without, _ = await session.tokens_per_s(run.plan.seconds, None, path, mode)
    kept, updates = await session.tokens_per_s(run.plan.seconds, run.plan.every_s, path, mode)
    figures |= {
        "tokens_s": round(without, 1),
        "tokens_s_with_updates": round(kept, 1),
        "tokens_kept": round(kept / without, 4) if without else None,
        "tokens_updates": updates,
    }
    run.say(f"{without:,.0f} tok/s without updates, {kept:,.0f} with {updates} in {run.plan.seconds:.0f} s")


async def _pool(run: _Run, session: Session, figures: dict[str, Any]) -> None:
    """Measure `publish` with Redis, ledger and roster: first, later, and after a worker left and came again."""
    await session.ensure()
    trainer, receivers = session.trainer, session.receivers
    try:
        with EmbeddedRedis() as server:
            where = {"redis_url": server.url, "pool": "bench"}
            joins = {"max_running": run.plan.running, "timeout_s": STEP_S, **where}
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
            later = [round(await publish(), 3) for _ in range(max(2, run.plan.rounds))]
            figures["ours_publish_ms"] = round(statistics.median(later), 3)
            figures["publish_rounds"] = later
            await receivers[-1].call("leave_pool", 2 * STEP_S, timeout_s=STEP_S)
            began = await receivers[-1].call("serve_pool", 2 * STEP_S, **joins)
            loaded = await receivers[-1].call("pool_version", 2 * STEP_S, version=last, timeout_s=STEP_S)
            figures["late_join_ms"] = round((loaded - began) * 1e3, 2)
            figures["regroup_ms"] = round(await publish(), 2)
            run.say(
                f"publish {figures['ours_publish_ms']} ms (first {figures['first_sync_ms']}, after a change of members "
                f"{figures['regroup_ms']}); late join {figures['late_join_ms']} ms"
            )
            await together(*(child.call("leave_pool", 2 * STEP_S, timeout_s=STEP_S) for child in receivers))
            await trainer.call("publisher_close", STEP_S)
    except BaseException:
        await session.close()  # its processes may wait for this Redis, which is gone
        raise


def describe(device: str) -> dict[str, Any]:
    """Return the host and the versions of a measurement."""
    import torch  # noqa: PLC0415

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    host: dict[str, Any] = {
        "device": device,
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "sglang": of("sglang"),
        "cores": len(os.sched_getaffinity(0)),
    }
    if device == "cuda":
        count = torch.cuda.device_count()
        host |= {
            "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return host


STEPS = {"paths": _paths, "stall": _stalls, "tokens": _tokens, "pool": _pool}
