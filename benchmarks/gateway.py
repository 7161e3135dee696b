"""`python -m benchmarks gateway`: what the pool's HTTP costs, and how much of it one process carries.

`limit`: requests/s of one gateway before an engine that answers at once, and the time that a request takes longer than
the same job of a RolloutClient, at a tenth of that. `streams`: many open streams on one gateway. `engine`: tokens/s
through the gateway, through the client, and through SGLang's own server, with a real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rolloutmq import BlockingRolloutClient
from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.flags import parse_extra
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.cpu_support import gpu_found

from .harness import Run, names, option, turns
from .http_load import POOL, Load, drive
from .http_load import run as ask
from .parts import BenchFailed, Part
from .sglang_server import sglang_server
from .sync.shapes import one_shape
from .workers import working

SIDES = ("pool", "gateway", "gateway_streamed", "sglang", "sglang_streamed")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    parts: str = option("limit,streams", "Some of limit, streams, engine.")
    rounds: int = option(3, "Rounds of each side, taken in turns.", min=1)
    requests: int = option(3000, "Requests in a round of limit.", min=10)
    connections: int = option(64, "Requests at the same time in it.", min=1)
    seconds: float = option(20.0, "Seconds of a round of latency.", min=1)
    answer: int = option(64, "Tokens of an answer of limit.", min=1)
    streams: int = option(2000, "Open streams.", min=1)
    stream_s: float = option(30.0, "How long each of them takes, at two tokens a second.", name="stream", min=1)
    model: str | None = option(None, "For engine; default: the tiny model.")
    shape: str | None = option(None, "For engine: random weights of this shape instead: 0.6b, 4b, 8b, …")
    prompts: int = option(1024, "For engine: prompts in a round.", min=1)
    max_running: int = option(256, "For engine: answers at the same time.", min=1)
    max_new_tokens: int = option(512, "For engine: tokens of each answer.", min=1)
    sides: str = option(",".join(SIDES), f"For engine: some of {','.join(SIDES)}, pool among them.")
    sglang: list[str] = option([], "For engine: further SGLang argument, NAME=JSON; repeatable.")


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """One gateway: its limit and latency, many streams, and tokens/s beside the pool's client and SGLang's server."""
    parts, figures = names("--parts", plan.parts, ("limit", "streams", "engine")), dict[str, Any]()
    if "limit" in parts:
        figures |= _limit(plan, run)
    if "streams" in parts:
        figures |= _streams(plan, run)
    if "engine" in parts:
        figures |= _engine(plan, run)
    return figures


# --- the gateway ------------------------------------------------------------------------------------------------------


class Served(psutil.Process):  # type: ignore[misc]
    """A gateway's process. port: where it listens."""

    port = 0

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        times = self.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def serving(url: str, tokenizer: Path) -> Iterator[Served]:
    """`rolloutmq gateway` as users start it, with its log in a file."""
    command = [sys.executable, "-m", "rolloutmq.ops.entry", "gateway", f"--redis={url}", f"--pool={POOL}"]
    command += ["--tokenizer", str(tokenizer)] if (tokenizer / "tokenizer.json").exists() else []
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([*command, "--port=0", "--json"], stdout=subprocess.PIPE, stderr=log, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)  # it has nothing to hand over
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            log.seek(0)
            raise BenchFailed(f"the gateway ended: {log.read()[-2000:].decode(errors='replace')}")
        served = Served(process.pid)
        served.port = int(json.loads(line)["url"].rpartition(":")[2].partition("/")[0])
        yield served


@contextlib.contextmanager
def scripted(run: Run, tokens_per_s: float | None = None, running: int = 4096) -> Iterator[tuple[str, Served]]:
    """A Redis, a worker with the scripted engine, and a gateway: its URL and process."""
    with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as model:
        write_tiny_model(Path(model))
        config = {"redis_url": redis.url, "pool": POOL, "max_running": running}
        with Part(_work, config, {"tokens_per_s": tokens_per_s}) as worker, serving(redis.url, Path(model)) as gateway:
            worker.line()
            run.say("a scripted worker and a gateway are up")
            yield redis.url, gateway


def _work(config: dict[str, Any], engine: dict[str, Any]) -> None:
    from .crowd import work

    work(1, config, engine)


# --- what is measured -------------------------------------------------------------------------------------------------


def _limit(plan: Plan, run: Run) -> dict[str, Any]:
    rates, costs, shares = [], [], []
    with scripted(run) as (url, gateway):
        at = str(gateway.port)
        ask(Load("gateway", at, plan.connections, plan.answer, plan.connections, seed=-1))
        for number in range(plan.rounds):
            cpu = gateway.cpu_s()
            found = ask(Load("gateway", at, plan.requests, plan.answer, plan.connections, seed=number))
            cpu = gateway.cpu_s() - cpu
            rates.append(plan.requests / found["seconds"])
            costs.append(cpu / plan.requests * 1e6)
            shares.append(cpu / found["seconds"])
            run.say(f"{rates[-1]:,.0f} requests/s, {costs[-1]:,.0f} µs of the gateway's CPU each")
        rate, sides = statistics.median(rates) / 10, {"pool": url, "gateway": at}
        times: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number, in_turn in turns([*sides], plan.rounds):
            for side in in_turn:
                count = max(100, int(rate * plan.seconds))
                found = ask(Load(side, sides[side], count, plan.answer, rate=rate, seed=number))
                times[side].append(found)
                run.say(f"{side}: p50 {found['p50_ms']:.1f} ms, p99 {found['p99_ms']:.1f} ms")
        memory = gateway.memory_info().rss >> 20
    median = {(side, name): statistics.median(it[name] for it in found) for side, found in times.items() for name in
              ("p50_ms", "p99_ms")}  # fmt: skip
    return {
        "requests_s": round(statistics.median(rates), 1),
        "cpu_us_per_request": round(statistics.median(costs)),
        "cpu_share": round(statistics.median(shares), 2),
        "latency_rate": round(rate, 1),
        **{f"{side}_{name}": round(value, 2) for (side, name), value in median.items()},
        **{f"added_{it}": round(median["gateway", it] - median["pool", it], 2) for it in ("p50_ms", "p99_ms")},
        "requests_s_rounds": [round(it, 1) for it in rates],
        "memory_mib": memory,
    }


def _streams(plan: Plan, run: Run) -> dict[str, Any]:
    with scripted(run, tokens_per_s=2.0, running=plan.streams) as (_, gateway):
        at, tokens = str(gateway.port), int(2 * plan.stream_s)
        ask(Load("gateway", at, 16, 2, 16, stream=True, seed=-1))
        before, cpu = gateway.memory_info().rss, gateway.cpu_s()
        with Part(
            drive, {"where": "gateway", "at": at, "count": plan.streams, "tokens": tokens, "stream": True}
        ) as part:
            most, came, answer = asyncio.run(_watch(gateway, part))
        cpu = gateway.cpu_s() - cpu
        after = gateway.memory_info().rss
    run.say(f"{plan.streams} streams: all ended right after {answer['seconds']:.1f} s")
    return {
        "streams": {
            "count": plan.streams,
            "most_connections": came,
            "seconds": round(answer["seconds"], 1),
            "expected_s": plan.stream_s,
            "cpu_share": round(cpu / answer["seconds"], 2),
            "memory_mib": {"before": before >> 20, "most": most >> 20, "after": after >> 20},
        }
    }


async def _watch(gateway: Served, part: Part) -> tuple[int, int, dict[str, Any]]:
    """The most memory and connections of the gateway until a Part ends, and what that said."""
    answer = asyncio.create_task(asyncio.to_thread(part.answer))
    memory = connections = 0
    while not answer.done():
        memory = max(memory, gateway.memory_info().rss)
        connections = max(connections, sum(it.laddr.port == gateway.port for it in gateway.net_connections("tcp")) - 1)
        await asyncio.wait({answer}, timeout=0.5)
    return memory, connections, answer.result()


def _engine(plan: Plan, run: Run) -> dict[str, Any]:
    if plan.model and plan.shape:
        raise ConfigError(f"--model {plan.model!r}, --shape {plan.shape!r}: one of them")
    shaped = one_shape(plan.shape) if plan.shape else None
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as redis, contextlib.ExitStack() as stack:
        model = Path(plan.model or Path(scratch, "model"))
        if shaped is not None:
            model.mkdir()
            shaped.write(model)
        elif plan.model is None:
            write_tiny_model(model)
        flags = [f"--max-running={plan.max_running}", *(f"--sglang={it}" for it in plan.sglang)]
        flags += ["--load-format=dummy"] if shaped else []
        log = Path(scratch, "worker.log")
        # Two engines on one GPU: the first takes a part of its memory, the second as much of what is left.
        share = ["--mem-fraction=0.45"] if gpu_found() else []
        worker = stack.enter_context(working(model, redis.url, log, f"--pool={POOL}", *flags, *share))
        with BlockingRolloutClient(redis.url, POOL) as client:
            worker.until_serving(client)
        gateway = stack.enter_context(serving(redis.url, model))
        config = {"model": str(model), "max_running": plan.max_running, "extra": parse_extra(plan.sglang)}
        config |= {"load_format": "dummy" if shaped else "auto"} | ({"mem_fraction": 0.8} if share else {})
        sglang = stack.enter_context(Part(sglang_server, config))
        port = sglang.line().strip()
        run.say("three servers are up")
        figures = _compare(plan, run, {"pool": redis.url, "gateway": str(gateway.port), "sglang": port}, gateway)
        sglang.kill()
    return {"engine": figures | {"model": model.name if plan.model else f"{plan.shape or 'tiny'}-shaped"}}


def _compare(plan: Plan, run: Run, at: dict[str, str], gateway: Served) -> dict[str, Any]:
    sides = names("--sides", plan.sides, SIDES)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    shares: dict[str, list[float]] = {side: [] for side in sides}
    for number, in_turn in turns(sides, plan.rounds + 1):
        for side in in_turn:
            where, _, streamed = side.partition("_")
            # The first round warms up with short answers, and is not counted.
            count, tokens = (plan.prompts, plan.max_new_tokens) if number else (plan.max_running, 64)
            cpu = gateway.cpu_s()
            found = ask(Load(where, at[where], count, tokens, stream=bool(streamed), seed=number))
            if number:
                rates[side].append(found["tokens"] / found["seconds"])
                shares[side].append((gateway.cpu_s() - cpu) / found["seconds"])
        run.say(
            f"round {number}: " + ", ".join(f"{side} {found[-1]:,.0f} tok/s" for side, found in rates.items() if found)
        )
    median = {side: statistics.median(found) for side, found in rates.items()}
    return {
        **{f"{side}_tok_s": round(value, 1) for side, value in median.items()},
        **{f"{side}_ratio": round(median[side] / median["pool"], 4) for side in sides if side != "pool"},
        "cpu_share": {side: round(statistics.median(shares[side]), 2) for side in sides if "gateway" in side},
        "rounds": {side: [round(it, 1) for it in found] for side, found in rates.items()},
        "prompts": plan.prompts,
        "max_running": plan.max_running,
        "max_new_tokens": plan.max_new_tokens,
    }
