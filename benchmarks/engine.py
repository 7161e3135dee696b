"""`python -m benchmarks engine`: the cost of the pool.

One engine in one process answers the same prompts in turns: given to it directly, all at once, and through the pool
(client process -> Redis -> worker -> engine -> worker -> Redis -> client process). The figure is the ratio of tokens
per second, so that a slow or busy host does not change it.
"""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.flags import as_config
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.engine import Engine, EngineRequest
from rolloutmq.worker.garbage import settle
from rolloutmq.worker.main import check_model
from rolloutmq.worker.sglang import SGLangConfig
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

from .sync.shapes import one_shape
from .watched import Switched, Watching, watching
from .workload import Workload


def run_engine_bench(
    *,
    model: str | None,
    shape: str | None,
    prompts: int,
    max_running: int,
    rounds: int,
    max_new_tokens: int,
    dtype: str,
    load_format: str,
    extra: dict[str, Any],
    quiet: bool,
    journals: bool = False,
    watched: bool = False,
) -> dict[str, Any]:
    """Run it and print the last line. Returns the line's content.

    journals: the pool takes each round once more, with a client that writes a journal. watched: and twice more, with
    metrics and with traces, and CPU time is counted.
    model: a directory or hub name. shape: name of a shape in sync/shapes.py, with random weights. Without both it is
    the tiny model. Raises ConfigError if both are given, for an unknown shape, and for a model that is nowhere.
    """
    console = Console(stderr=True, quiet=quiet)
    if model and shape:
        raise ConfigError(f"--model {model!r}, --shape {shape!r}: one of them")
    if model:
        check_model(model)
    shaped = one_shape(shape) if shape else None
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as server:
        if shaped is not None:
            shaped.write(Path(scratch))
            label, load_format = f"{shaped.name}-shaped", "dummy"
        elif model is None:
            write_tiny_model(Path(scratch))
            label = "tiny"
        else:
            label = Path(model).name
        source = model or scratch
        config = as_config(
            SGLangConfig, model=source, dtype=dtype, max_running=max_running, load_format=load_format, extra=extra
        )
        worker_config = as_config(WorkerConfig, redis_url=server.url, pool="bench", max_running=max_running)
        folder = str(Path(scratch, "journal")) if journals else ""
        workload = Workload(prompts, max_new_tokens, vocab_size=32000, journal=folder)
        redis_pid = server.pid if watched else None
        compared = _compare(config, worker_config, workload, rounds, console, redis_pid=redis_pid)
        figures = asyncio.run(compared) | {"model": label}
    print(json.dumps(figures))
    return figures


async def _compare(
    config: SGLangConfig,
    worker_config: WorkerConfig,
    base: Workload,
    rounds: int,
    console: Console,
    *,
    redis_pid: int | None,
) -> dict[str, Any]:
    """redis_pid: given if there are turns with metrics and with traces."""
    from rolloutmq.worker.sglang.engine import SGLangEngine  # noqa: PLC0415 – imports SGLang

    engine = SGLangEngine(config)
    switched = Switched(engine)
    worker = Worker(worker_config, switched.as_engine(), NoTokenizer())
    console.print("starting the engine")
    serving = asyncio.create_task(worker.run())
    stack = AsyncExitStack()
    try:
        joined = asyncio.create_task(worker.joined.wait())
        await asyncio.wait({joined, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            joined.cancel()
            await serving
        settle()  # as `rolloutmq worker` does
        base = replace(base, vocab_size=min(engine.info.vocab_size, base.vocab_size))
        warm_up = replace(base, count=min(base.count, worker_config.max_running), seed=rounds)
        await _direct(engine, warm_up)  # warms up kernels, caches and Python itself
        tokens: list[int] = []
        sides = ["direct", "pool", *(["journal"] if base.journal else [])]
        watch: Watching | None = None
        if redis_pid is not None:
            opened = watching(switched, worker.vitals, worker_config.redis_url, worker_config.pool, redis_pid)
            watch = await stack.enter_async_context(opened)
            sides += watch.SIDES
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds):
            # Every round has other prompts, so no cache has them. The order of the sides changes, so that a host that
            # gets slower or faster affects both alike.
            workload = replace(base, seed=number)
            count = workload.tokens
            tokens.append(count)
            for side in sides if number % 2 == 0 else reversed(sides):
                if side == "direct":
                    seconds = await _direct(engine, workload)
                else:
                    journal = base.journal if side == "journal" else ""
                    told = replace(workload, journal=journal, traces=side == "traces")
                    async with watch.turn(side) if watch else nullcontext(dict[str, float]()) as spent:
                        seconds, spent["client"] = await _through_pool(worker_config, told, count)
                    await engine.operate("flush_cache", {})  # for the other side, which has the same prompts
                rates[side].append(count / seconds)
            shown = (f"{side} {found[-1]:,.0f} tok/s" for side, found in rates.items())
            console.print(f"round {number + 1}: {', '.join(shown)}")
    finally:
        await stack.aclose()
        worker.drain()
        await serving
    info = engine.info
    median = {side: statistics.median(found) for side, found in rates.items()}
    return {
        "ratio": round(median["pool"] / median["direct"], 4),
        **{f"{side}_ratio": round(median[side] / median["pool"], 4) for side in sides[2:]},
        **(watch.figures(base.count) if watch else {}),
        "pool_tok_s": round(median["pool"], 1),
        "direct_tok_s": round(median["direct"], 1),
        "ratios": [round(ours / theirs, 4) for ours, theirs in zip(rates["pool"], rates["direct"], strict=True)],
        "rounds": rounds,
        "prompts": base.count,
        "tokens_per_round": round(statistics.mean(tokens)),
        "max_running": worker_config.max_running,
        "engine": f"{info.name} {info.version}",
        "device": info.device,
        "dtype": info.dtype,
        "python": platform.python_version(),
    }


async def _direct(engine: Engine, workload: Workload) -> float:
    """Return the engine's seconds for all prompts at once. The pool gets the same ones, so the cache key differs."""
    key = f"direct-{workload.seed}"
    requests = [
        EngineRequest(
            request_id=f"{job.id}{0:012x}",
            token_ids=job.token_ids,
            sampling=job.sampling,
            max_new_tokens=job.sampling.max_new_tokens,
            cache_key=key,
        )
        for job in workload.jobs()
        if job.token_ids is not None
    ]
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate(request) for request in requests))
    return time.perf_counter() - began


async def _through_pool(config: WorkerConfig, workload: Workload, tokens: int) -> tuple[float, float]:
    """Return a client process's seconds, and its CPU seconds, for all prompts.

    Raises RuntimeError unless `tokens` tokens come back.
    """
    command = [sys.executable, "-m", f"{__package__}.workload", config.redis_url, config.pool]
    process = await asyncio.create_subprocess_exec(
        *command, json.dumps(asdict(workload)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client process ended with {process.returncode}")
    answer = json.loads(output)
    if answer["tokens"] != tokens:
        raise RuntimeError(f"{answer['tokens']} tokens came back, {tokens} were asked for")
    return float(answer["seconds"]), float(answer["cpu"])
