"""The benchmarks of queue, engine, episodes, weight sync, large fleets and staleness: `python -m benchmarks queue`, or
`make bench-queue`. Each prints what it does, and ends with one line of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.ops.cli.options import Json, Plain, group, ids, log_to_stderr, say
from rolloutmq.ops.files import check_out, writing

app = group("Measure queue, engine, sync or a fleet; prints JSON last.", Plain)


@app.command("queue")
def bench_queue(
    peers: Annotated[str, typer.Option(help="Measured beside it: some of rq,arq,taskiq; or none.")] = "rq,arq,taskiq",
    rounds: Annotated[int, typer.Option(help="Turns of each system; the median counts.", min=1)] = 5,
    seconds: Annotated[
        float, typer.Option(help="Length of a turn, after a quarter of it to warm up.", min=0.1, max=3600)
    ] = 5.0,
    workers: Annotated[
        str, typer.Option("--growth-workers", help="Simulated workers for the growth of Redis' costs.")
    ] = "1,10,100,1000",
    lifecycles: Annotated[int, typer.Option(help="Jobs measured at each number of workers.", min=16)] = 8192,
    durable: Annotated[
        str, typer.Option(help="Levels: some of memory,everysec,always,disk_everysec,disk; or none.")
    ] = "memory,everysec,always,disk_everysec,disk",
    journal: Annotated[
        bool, typer.Option("--journals", help="Also with journals, in turns with turns without: what they cost.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too.")] = None,
    cache: Annotated[Path, typer.Option(help="Where peers' environments are made.")] = Path("out/bench-peers"),
    json: Json = False,
) -> None:
    """Jobs/s, latency, large payloads and Redis' CPU per job, beside RQ, arq, taskiq and the bare scripts; jobs/s and
    latency at each level of durability."""
    from .broker.bench import Plan, parse_levels, run_queue_bench
    from .broker.environments import parse_peers

    try:
        counts = tuple(int(count) for count in workers.split(","))
    except ValueError:
        raise ConfigError(f"--growth-workers {workers!r}: numbers with commas between them, such as 1,10,100") from None
    if min(counts) < 1:
        raise ConfigError(f"--growth-workers {workers!r}: at least 1 each")
    levels = parse_levels(durable)
    plan = Plan(parse_peers(peers), rounds, seconds, counts, lifecycles, cache, out, levels, journal)
    run_queue_bench(plan, quiet=json)


@app.command("shards")
def bench_shards(
    layouts: Annotated[str, typer.Option(help="Shards x Redis processes, the first to compare with.")] = "1x1,4x2",
    drivers: Annotated[
        int | None, typer.Option(help="Processes that submit and work. Default: the cores beside Redis.", min=1)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Turns of each layout; the median counts.", min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Length of a turn.", min=0.1, max=3600)] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too.")] = None,
    json: Json = False,
) -> None:
    """Jobs/s and Redis' CPU of a pool with its shards on one Redis process, and on several."""
    from .broker.sharded import ShardsPlan, default_drivers, parse_layouts, run_shards_bench

    parsed = parse_layouts(layouts)
    run_shards_bench(ShardsPlan(parsed, drivers or default_drivers(parsed), rounds, seconds, out), quiet=json)


@app.command("idle")
def bench_idle(
    clients: Annotated[
        int, typer.Option("--idle-clients", help="Clients, each waiting for a job that nobody can run.", min=0)
    ] = 5000,
    workers: Annotated[int, typer.Option("--idle-workers", help="Workers without work.", min=0)] = 1000,
    settle: Annotated[float, typer.Option(help="Seconds that they are left alone first.", min=0.0)] = 60.0,
    seconds: Annotated[float, typer.Option(help="Seconds that Redis is watched.", min=1.0)] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too.")] = None,
    json: Json = False,
) -> None:
    """Redis' CPU, connections and commands while many clients and workers are idle."""
    from .broker.idle import Crowd, run_idle_bench

    run_idle_bench(Crowd(clients, workers, settle, seconds), out=out, quiet=json)


@app.command("sync")
def bench_sync(
    shapes: Annotated[
        str | None, typer.Option(help="Some of tiny,tiny-moe,0.6b,4b,8b,moe. Default: tiny on a CPU, else 0.6b,8b,moe.")
    ] = None,
    paths: Annotated[
        str | None,
        typer.Option(
            help="Some of raw,stock_tensor,stock_bucket,ours,ours_unverified,stall,tokens,pool. Default: all."
        ),
    ] = None,
    receivers: Annotated[int | None, typer.Option(help="Engines, each on a GPU of its own. Default: 1.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Updates over each path, in turns; the median counts.", min=1)] = 8,
    seconds: Annotated[
        float, typer.Option(help="How long tokens/s is measured, without and with updates.", min=1, max=3600)
    ] = 15.0,
    every: Annotated[float, typer.Option(help="Seconds between those updates.", min=0.1, max=3600)] = 5.0,
    running: Annotated[
        int | None, typer.Option(help="Requests in a busy engine. Default: 64, on a CPU 16.", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="auto (GPUs, if there are two), cpu or cuda.")] = "auto",
    graphs: Annotated[bool, typer.Option(help="Decode with CUDA graphs; without, engines start sooner.")] = True,
    together: Annotated[bool, typer.Option("--together", help="Start the engines of all shapes at once.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Parameters without engines: the wire, checks and copies alone.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too, after every step.")] = None,
    json: Json = False,
) -> None:
    """Weights from a trainer into engines: raw broadcast, SGLang's own ways and ours, stalls, tokens/s kept, joins."""
    from .sync.bench import make_plan, run_sync_bench

    settings = {"rounds": rounds, "seconds": seconds, "every_s": every, "out": out}
    settings |= {"graphs": graphs, "together": together, "plain": plain}
    plan = make_plan(shapes, paths, device, receivers, **settings, running=running)
    run_sync_bench(plan, quiet=json)


@app.command("engine")
def bench_engine(
    model: Annotated[str | None, typer.Option(help="Default: the tiny model.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of this shape instead: 0.6b, 4b, 8b, …")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts per round.", min=1)] = 512,
    max_running: Annotated[int, typer.Option(help="Samples decoded at the same time.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each side, taken in turns.", min=1)] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer; lengths are spread below it.", min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    sglang: Annotated[list[str] | None, typer.Option(help="Further SGLang argument, NAME=JSON; repeatable.")] = None,
    journals: Annotated[
        bool, typer.Option("--journals", help="Also with journals, in turns with turns without: what they cost.")
    ] = False,
    watched: Annotated[
        bool, typer.Option("--watched", help="Also with metrics, and with traces: what they cost, in CPU time, too.")
    ] = False,
    json: Json = False,
) -> None:
    """Tokens/s through the pool divided by tokens/s of the same engine given the same prompts directly."""
    from rolloutmq.ops.flags import parse_extra

    from .engine import run_engine_bench

    log_to_stderr("warning")
    run_engine_bench(
        model=model,
        shape=shape,
        prompts=prompts,
        max_running=max_running,
        rounds=rounds,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        load_format=load_format,
        extra=parse_extra(sglang or []),
        quiet=json,
        journals=journals,
        watched=watched,
    )


@app.command("episodes")
def bench_episodes(
    episodes: Annotated[int, typer.Option(help="Episodes in all.", min=4)] = 200,
    turns: Annotated[int, typer.Option(help="Answers in each.", min=2)] = 4,
    concurrency: Annotated[int, typer.Option(help="Episodes at the same time.", min=2)] = 24,
    lease: Annotated[float, typer.Option(help="The workers' lease in seconds.", min=1.0)] = 3.0,
    stream: Annotated[bool, typer.Option(help="Save answers under way every 50 ms, as streams do.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too.")] = None,
    json: Json = False,
) -> None:
    """Episodes on two workers with the tiny model, one of which is killed: prefix cache, stalls, tokens lost."""
    from .episodes import EpisodesPlan, run_episodes_bench

    log_to_stderr("error")
    run_episodes_bench(EpisodesPlan(episodes, turns, concurrency, lease, stream, out), quiet=json)


@app.command("scale")
def bench_scale(
    scenario: Annotated[
        Path | None, typer.Argument(help="TOML, YAML or JSON file with what is simulated. Default: a day.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Simulated minutes of load, in place of the file's.")] = None,
    workers: Annotated[int | None, typer.Option(help="Most workers, in place of the file's. With --kill: all.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same load.")] = 0,
    partials: Annotated[
        str, typer.Option(help="Unfinished samples are continued: on, off, or both one after the other.")
    ] = "both",
    kill: Annotated[
        int | None, typer.Option(help="Instead, in real time: so many of 500 real workers die at once.")
    ] = None,
    lease: Annotated[float, typer.Option(help="Lease of these workers in seconds.", min=0.2, max=3600)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too.")] = None,
    json: Json = False,
) -> None:
    """A fleet of simulated engines on a real broker: queue seconds, GPU hours, wasted tokens and Redis' CPU."""
    from .scale.bench import ScalePlan, run_scale_bench
    from .scale.deaths import Deaths
    from .scale.scenario import read_scenario

    log_to_stderr("error")
    if partials not in {"both", "on", "off"}:
        raise ConfigError(f"--partials {partials!r}: on, off or both")
    given = {"minutes": minutes, "max_workers": workers if kill is None else None}
    read = read_scenario(scenario, **{name: value for name, value in given.items() if value is not None})
    deaths = None if kill is None else Deaths(500 if workers is None else workers, kill, lease, 6 * lease)
    run_scale_bench(ScalePlan(read, seed, partials, deaths, out), quiet=json)


@app.command()
def staleness(
    etas: Annotated[str, typer.Option(help="Bounds to compare, with commas.")] = "0,1,2,4,8",
    scenario: Annotated[
        str, typer.Option(help="balanced, slow-trainer, slow-pool, heavy-tail, or all of them.")
    ] = "all",
    on_stale: Annotated[str, typer.Option(help="drop, mark or wait.")] = "drop",
    training_steps: Annotated[int, typer.Option(min=2, max=100_000, help="Of each run.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths.")] = 0,
    slots: Annotated[int | None, typer.Option(help="Samples that the pool generates at once.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="Of one sample.")] = None,
    median_tokens: Annotated[int | None, typer.Option(help="Median length of a sample.")] = None,
    tail: Annotated[float | None, typer.Option(help="Sigma of the lengths' log-normal distribution.")] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds of training on one batch.")] = None,
    sync_s: Annotated[float | None, typer.Option(help="Seconds without generation at an update.")] = None,
    transfer_s: Annotated[float | None, typer.Option(help="Seconds from an update until the pool has it.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a step.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of a prompt.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG here; needs the extra `demo`.")] = None,
    json: Json = False,
) -> None:
    """Throughput, idle time and staleness against the bound eta, for slow trainers, slow pools and long samples."""
    from dataclasses import replace

    from .simulate import SHAPES, as_lines, as_state, draw, sweep

    if plot is not None:
        check_out("--plot", plot)
    if scenario not in (*SHAPES, "all"):
        raise InvalidField("--scenario", scenario, f"all, or one of {', '.join(SHAPES)}")
    bounds = ids("--etas", etas, "bounds such as 0,1,4")
    own = {
        "slots": slots,
        "tokens_per_s": tokens_per_s,
        "tokens": median_tokens,
        "tail": tail,
        "step_s": step_s,
        "sync_s": sync_s,
        "transfer_s": transfer_s,
        "batch_size": batch_size,
        "group": samples,
    }
    given = {name: value for name, value in own.items() if value is not None}
    shapes = {
        name: replace(shape, **given)  # type: ignore[arg-type]
        for name, shape in SHAPES.items()
        if scenario in (name, "all")
    }
    found = {name: sweep(shape, bounds, on_stale, training_steps, seed) for name, shape in shapes.items()}
    if plot is not None:
        with writing("--plot", plot):
            plot.parent.mkdir(parents=True, exist_ok=True)
            draw(plot, found, f"on_stale={on_stale}, {training_steps} steps, seed {seed}")
    say(as_state(shapes, found, on_stale=on_stale, steps=training_steps, seed=seed), as_lines(found), json)


if __name__ == "__main__":
    app()
