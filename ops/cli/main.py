"""The command line: one small function per command, each of which imports what it needs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from ...messages.redis import DEFAULT_URL
from .bench import bench_queue, bench_sync
from .clients import cancel, replies
from .config import app as config_commands
from .control import app as control
from .dead import app as dead
from .errors import plain_errors
from .generate import generate
from .operations import app as ops
from .options import Pool, RedisUrl
from .tasks import decode, embed, reward, score
from .weights import app as weights

app = typer.Typer(
    name="rolloutmq",
    help="A rollout pool for asynchronous RL: Redis jobs in, version-tagged samples out.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(help="Measure; every bench ends with one line of JSON.", no_args_is_help=True)
bench.command("queue")(bench_queue)
bench.command("sync")(bench_sync)
app.add_typer(bench, name="bench")
app.command("generate")(generate)
app.command("cancel")(cancel)
for command in (embed, score, reward, decode):
    app.command()(command)
app.add_typer(replies, name="replies")
app.add_typer(dead, name="dead")
app.add_typer(ops, name="ops")
app.add_typer(weights, name="weights")
app.add_typer(config_commands, name="config")
app.add_typer(control, name="control")


@app.command()
def worker(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Directory or hub name of the model; its weights are version 0.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML, TOML or JSON; flags win over it.")] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size; divides the tensor-parallel size.")] = 1,
    max_running: Annotated[int, typer.Option(help="Samples decoded at the same time.")] = 256,
    prefetch: Annotated[int | None, typer.Option(help="Samples queued in the engine; default max-running / 8.")] = None,
    lease: Annotated[float, typer.Option(help="Seconds of silence after which others get this worker's jobs.")] = 10.0,
    checkpoint: Annotated[float, typer.Option(help="Seconds after which a running sample is saved again.")] = 10.0,
    drain: Annotated[float, typer.Option(help="Seconds that SIGTERM leaves to running samples.")] = 30.0,
    max_lost: Annotated[int, typer.Option(help="A job is dead-lettered when its worker died this often.")] = 3,
    snapshots: Annotated[
        Path | None, typer.Option(help="Folder where the publisher saves versions: looked at when behind.")
    ] = None,
    media_host: Annotated[
        list[str] | None, typer.Option(help="Host to fetch media of jobs from; repeatable. Default: none.")
    ] = None,
    context_length: Annotated[int | None, typer.Option(help="Most tokens of prompt and output together.")] = None,
    mem_fraction: Annotated[float | None, typer.Option(help="Share of device memory for weights and KV cache.")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache in tokens.")] = None,
    staging: Annotated[str, typer.Option(help="auto, on or off: receive weights beside those that serve.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    attention_backend: Annotated[str | None, typer.Option(help="SGLang's name; default its own choice.")] = None,
    sampling_backend: Annotated[str | None, typer.Option(help="SGLang's name; default its own choice.")] = None,
    cuda_graph: Annotated[bool, typer.Option(help="Capture CUDA graphs for decoding.")] = True,
    prefill_cuda_graph: Annotated[bool, typer.Option(help="Capture CUDA graphs for prefill (slow start).")] = True,
    cpu_threads: Annotated[int | None, typer.Option(help="Threads of the engine on a CPU.")] = None,
    task: Annotated[str, typer.Option(help="generate; or embed or reward, for a model that pools.")] = "generate",
    max_lora_rank: Annotated[int | None, typer.Option(help="Take LoRA adapters up to this rank (GPUs only).")] = None,
    tokenizer: Annotated[
        str, typer.Option(help="auto, on or off: the engine looks for stop texts, grammars.")
    ] = "auto",
    hidden_states: Annotated[bool, typer.Option(help="Jobs may ask for hidden states.")] = False,
    routed_experts: Annotated[bool, typer.Option(help="Jobs may ask which experts each token went to.")] = False,
    deterministic: Annotated[bool, typer.Option(help="Honour the seeds of jobs.")] = False,
    logit_processor: Annotated[
        list[str] | None, typer.Option(help="A logit processor of your own, NAME=MODULE:CLASS; repeatable.")
    ] = None,
    memory_saver: Annotated[str, typer.Option(help="off, on or backup: the engine can sleep (GPUs only).")] = "off",
    sglang: Annotated[list[str] | None, typer.Option(help="Further SGLang argument, NAME=JSON; repeatable.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a pool with one SGLang engine until SIGTERM or Ctrl-C, then drain and leave."""
    from ...worker.main import exit_at_once, run_worker
    from ..config.load import load_settings

    _log(log_level)
    with plain_errors():
        settings = load_settings(config, context=context)
        run_worker(settings.worker(), settings.engine())
        exit_at_once()


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="JSONL: per line a job with text, messages or token_ids.", exists=True)],
    out: Annotated[Path, typer.Option(help="JSONL of results, in the order of the input.")],
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    n: Annotated[int, typer.Option(help="Samples per line, where the line does not say.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Where the line does not say.")] = 128,
    temperature: Annotated[float, typer.Option(help="Where the line does not say.")] = 1.0,
    window: Annotated[int, typer.Option(help="Jobs outstanding at a time.")] = 1024,
    logprobs: Annotated[bool, typer.Option(help="Write the logprob of every token.")] = False,
    lora: Annotated[str | None, typer.Option(help="LoRA adapter to sample with, where the line does not say.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a finished output file.")] = False,
) -> None:
    """Answer every line of a file exactly once. Stopped with Ctrl-C, the same command goes on where it was."""
    from ..submit import Defaults, submit_file

    _log("warning")
    with plain_errors():
        code = submit_file(
            file,
            out,
            redis,
            pool,
            Defaults(n=n, max_new_tokens=max_new_tokens, temperature=temperature, logprobs=logprobs, lora=lora),
            window=window,
            overwrite=overwrite,
        )
    raise typer.Exit(code)


@app.command()
def status(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """What is queued, who works on it, which weights they serve."""
    from ..status import show_status

    with plain_errors():
        show_status(redis, pool, as_json=json)


@app.command("redis")
def redis_server(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 picks a free one.")] = 6379,
    directory: Annotated[Path | None, typer.Option(help="Keep data here, with an append-only file.")] = None,
) -> None:
    """Run an embedded redis-server on this machine until Ctrl-C: for laptops and trials."""
    import signal

    from ..redis import EmbeddedRedis

    saved = directory is not None
    with plain_errors(), EmbeddedRedis(port=port or None, directory=directory, appendonly=saved) as server:
        typer.echo(server.url)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


@app.command("tiny-model")
def tiny_model(directory: Annotated[Path, typer.Argument(help="Where to write it.")]) -> None:
    """Write a tiny random Qwen2-style model with a byte-level tokenizer: something to try a worker with, offline."""
    from ..tiny_model import write_tiny_model

    write_tiny_model(directory)
    typer.echo(f"wrote {directory}: rolloutmq worker --model {directory}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where summary.json and report.png go.")] = Path("out/demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps; default: as many as the demo needs.")] = None,
    seed: Annotated[int, typer.Option(help="Of the task, the model and the trainer.")] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="Train on the first GPU, serve on the others.")] = False,
) -> None:
    """Asynchronous RL on this machine: a trainer learns from what a pool generates, while workers die and join."""
    from ..demo import run_demo

    raise typer.Exit(run_demo(out, steps=steps, seed=seed, gpus=gpus))


@bench.command("engine")
def bench_engine(
    model: Annotated[str | None, typer.Option(help="Default: the tiny model.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of this shape instead: 0.6b, 4b, 8b, …")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts per round.")] = 512,
    max_running: Annotated[int, typer.Option(help="Samples decoded at the same time.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each side, taken in turns.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer; lengths are spread below it.")] = 128,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    sglang: Annotated[list[str] | None, typer.Option(help="Further SGLang argument, NAME=JSON; repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Nothing but the last line.")] = False,
) -> None:
    """Tokens/s through the pool divided by tokens/s of the same engine given the same prompts directly."""
    from ..bench.engine import run_engine_bench
    from .options import parse_extra

    _log("warning")
    with plain_errors():
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
        )


def _log(level: str) -> None:
    logging.basicConfig(
        level=getattr(logging, level.upper(), logging.INFO), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
