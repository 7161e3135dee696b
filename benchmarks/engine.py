"""`python -m benchmarks engine`: the cost of the pool.

One engine in one process answers the same prompts in turns: given to it directly, all at once, and through the pool
(client process -> Redis -> worker -> engine -> worker -> Redis -> client process). The figure is the ratio of tokens
per second, so that a slow or busy host does not change it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.flags import as_config, parse_extra
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.engine import Engine, EngineRequest
from rolloutmq.worker.garbage import settle
from rolloutmq.worker.main import check_model
from rolloutmq.worker.sglang import SGLangConfig
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

from .harness import Run, option, turns
from .parts import BenchFailed, Part
from .sync.shapes import one_shape
from .watched import Watching, watching
from .workload import PROCESSORS, Workload, run_client


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: the tiny model, unless there is a model or a shape."""

    model: str | None = option(None, "Default: the tiny model.")
    shape: str | None = option(None, "Random weights of this shape instead: 0.6b, 4b, 8b, …")
    prompts: int = option(512, "Prompts per round.", min=1)
    max_running: int = option(64, "Samples decoded at the same time.", min=1)
    rounds: int = option(3, "Rounds of each side, taken in turns.", min=1)
    max_new_tokens: int = option(128, "Longest answer; lengths are spread below it.", min=1)
    dtype: str = option("auto", "auto, bfloat16, float16 or float32.")
    sglang: list[str] = option([], "Further SGLang argument, NAME=JSON; repeatable.")
    watched: bool = option(False, "Also with metrics, and with traces: what they cost, in CPU time, too.")
    processors: bool = option(False, "Also with each logit processor in every job: what it costs.")


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Tokens/s through the pool divided by tokens/s of the same engine given the same prompts directly."""
    if plan.model and plan.shape:
        raise ConfigError(f"--model {plan.model!r}, --shape {plan.shape!r}: one of them")
    if plan.model:
        check_model(plan.model)
    shaped = one_shape(plan.shape) if plan.shape else None
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as server:
        if shaped is not None:
            shaped.write(Path(scratch))
        elif plan.model is None:
            write_tiny_model(Path(scratch))
        config = as_config(
            SGLangConfig,
            model=plan.model or scratch,
            dtype=plan.dtype,
            max_running=plan.max_running,
            load_format="dummy" if shaped else "auto",
            extra=parse_extra(plan.sglang),
        )
        worker_config = as_config(WorkerConfig, redis_url=server.url, pool="bench", max_running=plan.max_running)
        workload = Workload(plan.prompts, plan.max_new_tokens, vocab_size=32000)
        redis_pid = server.pid if plan.watched else None
        more = list(PROCESSORS) if plan.processors else []
        figures = asyncio.run(
            _compare(config, worker_config, workload, plan.rounds, run, processors=more, redis_pid=redis_pid)
        )
    label = Path(plan.model).name if plan.model else f"{shaped.name}-shaped" if shaped else "tiny"
    return figures | {"model": label}


async def _compare(
    config: SGLangConfig,
    worker_config: WorkerConfig,
    base: Workload,
    rounds: int,
    run: Run,
    *,
    processors: list[str],
    redis_pid: int | None,
) -> dict[str, Any]:
    """processors: further turns, in which every job has the one of that name. redis_pid: given if there are turns
    with metrics and with traces."""
    from rolloutmq.worker.sglang.engine import SGLangEngine

    engine = SGLangEngine(config)
    worker = Worker(worker_config, engine, NoTokenizer())
    run.say("starting the engine")
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
        sides = ["direct", "pool", *processors]
        watch: Watching | None = None
        if redis_pid is not None:
            opened = watching(worker.vitals, worker_config.redis_url, worker_config.pool, redis_pid)
            watch = await stack.enter_async_context(opened)
            sides += watch.SIDES
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number, in_turn in turns(sides, rounds):
            # Every round has other prompts, so no cache has them.
            workload = replace(base, seed=number)
            count = workload.tokens
            tokens.append(count)
            for side in in_turn:
                if side == "direct":
                    seconds = await _direct(engine, workload)
                else:
                    told = replace(workload, traces=side == "traces", processor=side if side in processors else "")
                    async with watch.turn(side) if watch else nullcontext(dict[str, float]()) as spent:
                        seconds, spent["client"] = await _through_pool(worker_config, told, count)
                    await engine.operate("flush_cache", {})  # for the other side, which has the same prompts
                rates[side].append(count / seconds)
            shown = (f"{side} {found[-1]:,.0f} tok/s" for side, found in rates.items())
            run.say(f"round {number + 1}: {', '.join(shown)}")
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

    Raises BenchFailed unless `tokens` tokens come back.
    """
    with Part(run_client, config.redis_url, config.pool, asdict(workload)) as client:
        answer = await asyncio.to_thread(client.answer)
    if answer["tokens"] != tokens:
        raise BenchFailed(f"{answer['tokens']} tokens came back, {tokens} were asked for")
    return float(answer["seconds"]), float(answer["cpu"])
