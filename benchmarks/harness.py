"""One harness for all benchmarks: options, what is said on the way, and the JSON at the end with host and command.

A benchmark is a module with a dataclass `Plan`, whose fields are its options, and `measure(plan, run)`, which returns
figures.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
BENCHMARKS = {
    "queue": ("broker.bench", "Jobs/s, latency, large payloads and Redis' CPU per job, beside RQ, arq and taskiq."),
    "shards": ("broker.sharded", "Jobs/s and Redis' CPU of a pool on one Redis process, and on several."),
    "idle": ("broker.idle", "What many clients and workers cost Redis while they wait."),
    "engine": ("engine", "Tokens/s through the pool, by those of the same engine given the prompts directly."),
    "gateway": ("gateway", "One gateway: requests/s, added latency, open streams, tokens/s beside SGLang's server."),
    "page": ("page", "The dashboard of 1,000 workers: its server, Redis, and a browser's first paint and updates."),
    "turns": ("turns", "Conversations through verl's server: prefix cache with and without its stickiness."),
    "episodes": ("episodes", "Episodes on two workers, one of which is killed: prefix cache, stalls, tokens lost."),
    "sync": ("sync.bench", "Weights into engines: raw broadcast, SGLang's own ways and ours, stalls, joins."),
    "scale": ("scale.bench", "A day of 1,000 simulated engines on a real broker, or real workers that die at once."),
    "spread": ("spread.bench", "How evenly work is spread, beside an ideal balancer."),
    "fleet": ("fleet.bench", "New weights for a fleet that churns: deaths, 128 workers, 1,000 simulated."),
    "updates": ("updates", "What updates cost a worker in each mode, by contexts and intervals."),
    "curves": ("curves", "Whether an update's mode changes what is learned."),
    "overlap": ("overlap", "An asynchronous training loop beside a synchronous one."),
    "one-gpu": ("one_gpu", "A GPU shared by trainer and worker, beside TRL's own generation."),
    "startup": ("startup", "A worker's start, phase by phase."),
    "replay": ("replay", "A run is recorded and generated again: how many samples come out the same."),
    "journal": ("journal", "A journal of a million results: its size, rate, and cold queries."),
    "worst-calls": ("worst_calls", "How long Redis is busy with each script's slowest call."),
    "staleness": ("simulate", "Throughput, idle time and staleness against the bound eta, computed."),
}
"""Name -> (module, the line of `python -m benchmarks --help`)."""
PACKAGES = ("redis", "hiredis", "msgpack", "pydantic", "numpy", "zstandard", "torch", "sglang", "transformers", "trl")


def option(default: T, about: str, **settings: Any) -> T:
    """A field of a Plan, and its option. settings: min, max, name (of the option, if not the field's), argument."""
    made: Any
    if isinstance(default, list):
        made = field(default_factory=default.copy, metadata={"about": about, **settings})
    else:
        made = field(default=default, metadata={"about": about, **settings})
    return made  # type: ignore[no-any-return]


def names(option: str, text: str, known: Iterable[str], *, none: bool = False) -> list[str]:
    """Some of the known names, with commas between them. none: it may be that word. Raises ConfigError."""
    from rolloutmq.messages.errors import ConfigError

    known, found = list(known), [name.strip() for name in text.split(",") if name.strip()]
    if none and found in ([], ["none"]):
        return []
    if strange := sorted(set(found) - set(known)) or not found:
        raise ConfigError(f"{option} {text!r}: some of {', '.join(known)}{', or none' * none}; unknown: {strange}")
    return found


def turns(variants: Sequence[T], rounds: int) -> Iterator[tuple[int, list[T]]]:
    """Rounds in which every variant has one turn; another one begins each, as a host gets slower and faster."""
    for number in range(rounds):
        first = number % len(variants)
        yield number, [*variants[first:], *variants[:first]]


class Run:
    """What a benchmark is given, to say how far it is and to keep what it has."""

    def __init__(self, out: Path | None, *, quiet: bool) -> None:
        """out: a file for the figures. Raises InvalidField if it cannot be written."""
        from rolloutmq.ops.files import check_out

        if out is not None:
            check_out("--out", out)
        self._out, self._quiet = out, quiet
        self._facts = {"host": host(), "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])}

    def say(self, *words: object, **figures: object) -> None:
        """Tell whoever watches."""
        if not self._quiet:
            told = (f"{name} {value}" for name, value in figures.items())
            print(*words, *told, file=sys.stderr, flush=True)

    def keep(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Write figures with host and command, in place of what was written before: a run that is killed keeps them."""
        from rolloutmq.ops.files import writing

        found = figures | self._facts
        if self._out is not None:
            with writing("--out", self._out):
                self._out.parent.mkdir(parents=True, exist_ok=True)
                part = self._out.with_suffix(self._out.suffix + ".part")
                part.write_text(json.dumps(found, indent=2) + "\n")
                part.replace(self._out)
        return found


def run(plan: Any, out: Path | None = None, *, quiet: bool = False) -> dict[str, Any]:
    """Run the benchmark that a Plan is of, and print its figures as the last line. Returns them."""
    running = Run(out, quiet=quiet)
    found = running.keep(import_module(type(plan).__module__).measure(plan, running))
    print(json.dumps(found))
    return found


def host() -> dict[str, Any]:
    """CPU, memory, load before the run, and versions; GPUs if torch is loaded and has some."""
    import redis

    from rolloutmq.ops.redis import EmbeddedRedis

    load = os.getloadavg()[0]
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        version = client.info("server")["redis_version"]
    found: dict[str, Any] = {
        "cpu": _cpu_name() or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "redis": str(version),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found |= {"gpus": gpus, "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
