"""A pool's run is recorded, and then generated again token by token: how many samples come out the same?

    python -m benchmarks replay --jobs 1000 --out benchmarks/results/replay-cpu.json
    python -m benchmarks replay --jobs 200 --shape 0.6b --out benchmarks/results/replay-h200.json

Two real workers with deterministic engines serve a pool. Its jobs use what has an influence on tokens: groups, stops,
grammars, biases, penalties, logit processors, tools, sessions, texts and chats. While they run, weights are
published three times (once in place), every version is saved, and one worker is killed with SIGKILL. Afterwards the
workers are gone, and an engine in this process replays the journal as `rolloutmq replay` does.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from rolloutmq import GenerateJob, RolloutClient, WeightPublisher
from rolloutmq.messages.journal import Journal
from rolloutmq.ops.flags import parse_extra
from rolloutmq.ops.journal.live import Live, live_of
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.replay import Recorded, Settings, recorded, replay_tokens, summary
from rolloutmq.ops.tiny_model import write_tiny_model

from .harness import Run, option
from .parts import BenchFailed
from .sync.shapes import one_shape, write_random
from .workers import RealWorker, working

TEXT = "text"
LONGS = 2
DEATH, IN_PLACE = 1, 2
"""Of the four things that happen, while so many long samples run, the second and the third."""
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}})
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "group": {"n": 4},
    "greedy": {"sampling": {"temperature": 0.0}},
    "top_p": {"sampling": {"top_p": 0.8, "temperature": 0.7}},
    "top_k": {"sampling": {"top_k": 12, "temperature": 1.3}},
    "stop": {"text": "Say e", "sampling": {"stop": ["e", "##"], "include_stop": False}},
    "stop_regex": {"text": "Digits", "sampling": {"stop_regex": ["[0-9]{2}", "z+y"]}},
    "stop_tokens": {"sampling": {"stop_token_ids": list(range(60, 90)), "min_new_tokens": 9, "include_stop": False}},
    "sequences": {"sampling": {"stop_token_sequences": [[71, 72], [80]], "ignore_eos": True}},
    "json": {"text": "An object:", "sampling": {"json_schema": SCHEMA}},
    "regex": {"text": "A date:", "sampling": {"regex": "20[0-9]{2}-[01][0-9]-[0-3][0-9]( [a-z]+)*"}},
    "ebnf": {"text": "A sum:", "sampling": {"ebnf": 'root ::= term ("+" term){2,9}\nterm ::= [1-9] [0-9]*'}},
    "bias": {"sampling": {"logit_bias": {70: 4.0, 71: 3.0, 72: -10000.0}}},
    "penalties": {"sampling": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}},
    "processors": {
        "logit_processors": [
            {"name": "temperature_schedule", "params": {"points": [[0, 0.5], [40, 1.5]]}},
            {"name": "disallowed_tokens", "params": {"token_ids": list(range(100, 120))}},
        ]
    },
    "scaled": {"logprobs": {"kind": "scaled", "top": 2, "prompt": True}, "sampling": {"temperature": 1.4}},
    "tools": {"messages": [{"role": "user", "content": "1 + 2"}], "tools": [{"function": ADD}]},
    "chat": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
    "session": {},
}


def worker_options(dtype: str, sglang: list[str], *, gpu: bool) -> list[str]:
    """Of the worker's command line."""
    options = {
        "--dtype": dtype,
        "--max-running": "64" if gpu else "8",
        "--lease": "2",
        "--checkpoint": "0.3",
        # Two engines that start at once take each other's memory for their own, so the KV cache has a fixed size.
        "--mem-fraction": "0.8" if gpu else "0.3",
        "--max-total-tokens": "131072" if gpu else "65536",
    }
    pairs = [*options.items(), *(("--sglang", setting) for setting in sglang)]
    return ["--deterministic", *(word for pair in pairs for word in pair)]


def write_model(folder: Path, shape: str) -> None:
    """A checkpoint with random weights and a tokenizer of bytes."""
    if shape == TEXT:
        write_tiny_model(folder, dtype="float32", context=4096)
    else:
        write_random(one_shape(shape), folder)


def weights_of(model: Path, version: int) -> dict[str, torch.Tensor]:
    """The model's tensors, each moved a little, in a way that depends on the version."""
    random = torch.Generator().manual_seed(version)
    base = load_file(model / "model.safetensors")
    return {
        name: tensor + (torch.randn(tensor.shape, generator=random) * 0.1 * tensor.float().std()).to(tensor.dtype)
        if tensor.dim() > 1
        else tensor
        for name, tensor in base.items()
    }


def jobs_of(count: int, vocab: int) -> Iterator[tuple[str, GenerateJob]]:
    """Jobs of all kinds, in turns, with the kind's name."""
    random = np.random.default_rng(0)
    names = list(KINDS)
    for number in range(count):
        kind = names[number % len(names)]
        fields = dict(KINDS[kind])
        if not {"text", "messages"} & fields.keys():
            fields["token_ids"] = random.integers(3, vocab, int(random.integers(3, 80))).tolist()
        most = int(random.integers(20, 90))
        sampling = {"max_new_tokens": most} | fields.pop("sampling", {})
        seed = None if kind == "greedy" else number
        yield kind, GenerateJob.build(sampling=sampling, seed=seed, metadata={"kind": kind}, **fields)


def long_job(number: int, tokens: int) -> GenerateJob:
    """One that still runs when something happens. It is stopped then."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return GenerateJob.build(
        token_ids=[10 + number, 20, 30], sampling=sampling, seed=number, priority="high", metadata={"kind": "long"}
    )


class Recording:
    """The recorded run: jobs, and what happens to the pool meanwhile."""

    def __init__(self, arguments: Plan, url: str, folder: Path, workers: list[RealWorker]) -> None:
        self.arguments, self.url, self.folder, self.workers = arguments, url, folder, workers

    async def record(self) -> None:
        """Everything, until all results are in the journal."""
        vocab = 259 if self.arguments.shape == TEXT else one_shape(self.arguments.shape).vocab - 2
        jobs = list(jobs_of(self.arguments.jobs - 4 * LONGS, vocab))
        quarter = -(-len(jobs) // 4)
        with Journal(self.folder / "journal") as journal:
            async with RolloutClient(self.url, journal=journal) as client, asyncio.TaskGroup() as running:
                while len(await client.workers()) < len(self.workers):
                    for worker in self.workers:
                        worker.check()
                    await asyncio.sleep(0.2)
                for number in range(4):
                    longs = [long_job(LONGS * number + i, self.arguments.long) for i in range(LONGS)]
                    handles = [await client.submit(job) for job in longs]
                    for handle in handles:
                        running.create_task(client.wait(handle))
                    for kind, job in jobs[quarter * number : quarter * (number + 1)]:
                        running.create_task(self.one(client, kind, job))
                    first = handles[0].job_id
                    before = await saved(client, first, lambda live: True)
                    await asyncio.to_thread(self.happen, number, str(before.facts["worker"]))
                    after = await saved(client, first, lambda live: True)
                    await saved(client, first, shows(number, before, after))
                    await client.stop(handles)

    async def one(self, client: RolloutClient, kind: str, job: GenerateJob) -> None:
        """One job; a session asks a second time."""
        if kind != "session":
            await client.wait(await client.submit(job, timeout=600))
            return
        assert job.token_ids is not None
        turn = {"sampling": job.sampling, "seed": job.seed, "metadata": job.metadata}
        async with client.session(**turn) as session:
            await session.generate(job.token_ids.tolist(), timeout=600)
            await session.generate([70, 71, 72], timeout=600)

    def happen(self, number: int, worker_id: str) -> None:
        """New weights, the death of this worker, weights in place, new weights."""
        if number == DEATH:
            next(worker for worker in self.workers if f"-{worker.process.pid}-" in worker_id).kill()
            return
        self.publish(number + 1, "in_place" if number == IN_PLACE else "resume")

    def publish(self, version: int, mode: Any) -> None:
        folder = self.folder / "snapshots"
        with WeightPublisher(self.url, snapshots=folder, keep_snapshots=10, mode=mode) as publisher:
            report = publisher.publish(version, weights_of(self.folder / "model", version)).wait(120)
            assert report.state == "committed", report


async def saved(client: RolloutClient, job_id: str, enough: Callable[[Live], bool]) -> Live:
    """A job of one sample, once the pool has so much of its unfinished sample. Raises TimeoutError after 180 s."""
    async with asyncio.timeout(180):
        while True:
            live = await live_of(client.broker, job_id)
            assert live is not None
            if live.state not in {"queued", "running"}:
                raise BenchFailed(f"a long job is {live.state} before anything happened to it: --long has to be more")
            if live.partials and enough(live):
                return live
            await asyncio.sleep(0.02)


def shows(number: int, before: Live, after: Live) -> Callable[[Live], bool]:
    """Whether a sample has been touched by what happened: another worker went on with it, or it has newer tokens.

    before, after: the sample then. What a dead worker saved is in `after`.
    """

    def continued(live: Live) -> bool:
        newer = live.partials[0]["tokens"] > after.partials[0]["tokens"]
        return newer and bool(live.facts["attempt"] > before.facts["attempt"])

    def switched(live: Live) -> bool:
        return bool(live.partials[0]["versions"] != before.partials[0]["versions"])

    return continued if number == DEATH else switched


def covered(samples: list[Recorded]) -> dict[str, int]:
    """How many samples something happened to."""
    results = [sample.result for sample in samples]
    return {
        "continued_by_another_worker": sum(result.attempt > 1 and bool(result.legs) for result in results),
        "several_versions": sum(len(result.versions) > 1 for result in results),
        "switched_in_place": sum(bool(result.in_place) for result in results),
        "in_groups": sum(result.n > 1 for result in results),
        "stopped_early": sum(result.finish_reason == "abort" for result in results),
        "ended_by_a_stop": sum(result.finish_reason == "stop" for result in results),
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """What is recorded."""

    jobs: int = option(100, "Of all kinds, in turns.", min=16)
    shape: str = option(TEXT, f"{TEXT}, a tiny model in float32, or one of `benchmarks sync`.")
    long: int = option(3000, "Most tokens of jobs that run while something happens.", min=1)
    sglang: list[str] = option([], "NAME=JSON of SGLang, for workers and replay; repeatable.")
    folder: Path | None = option(None, "Keep model, journal and snapshots here.")


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """A pool's run is recorded, and then generated again token by token: how many samples come out the same."""
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        return _measure(plan, plan.folder or Path(scratch))


def _measure(arguments: Plan, folder: Path) -> dict[str, Any]:
    model, gpu = folder / "model", torch.cuda.is_available()
    write_model(model, arguments.shape)
    dtype = "float32" if arguments.shape == TEXT else "bfloat16"
    began = time.monotonic()
    with EmbeddedRedis() as server, ExitStack() as stack:
        options = worker_options(dtype, arguments.sglang, gpu=gpu)
        logs = (folder / f"worker-{number}.log" for number in range(2))
        workers = [stack.enter_context(working(model, server.url, log, *options)) for log in logs]
        asyncio.run(Recording(arguments, server.url, folder, workers).record())
    recorded_at = time.monotonic()
    samples = list(recorded(folder / "journal"))
    settings = {"dtype": dtype, "mem_fraction": 0.7 if gpu else 0.3, "extra": parse_extra(arguments.sglang)}
    verdicts = replay_tokens(samples, Settings(model=str(model), snapshots=folder / "snapshots", engine=settings))
    ended = time.monotonic()
    return {
        "shape": arguments.shape,
        "jobs": len({sample.result.job_id for sample in samples}),
        "kinds": dict(Counter(str(sample.result.metadata["kind"]) for sample in samples)),
        "fingerprint": dict(samples[0].result.fingerprint),
        "happened": covered(samples),
        "summary": summary(verdicts),
        "not_the_same": [verdict.as_data() for verdict in verdicts if verdict.state != "same"][:20],
        "recorded_s": round(recorded_at - began, 1),
        "replayed_s": round(ended - recorded_at, 1),
    }
