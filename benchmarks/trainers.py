"""Figures of the trainers' examples, and of staleness as it is simulated beside staleness as it is measured.

    PYTHONPATH=tests python -m benchmarks.trainers examples --out benchmarks/results/trl-cpu.json
    PYTHONPATH=tests python -m benchmarks.trainers staleness --out benchmarks/results/staleness-cpu.json

Each starts a Redis and workers with real SGLang of its own. `examples` needs the extra `trl`; it runs the programs with
two workers and kills one when half of the steps are done. `staleness` runs an asynchronous loop with three bounds.
Of each it takes how long a step, a transfer and a token took, and has `benchmarks staleness` predict the rest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import random
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.pools.worker_process import WorkerProcess

from rolloutmq import BlockingRolloutClient, GenerateJob, RolloutResult, SamplingParams, Staleness, WeightPublisher
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import load_tiny_model, write_tiny_model

from .simulate import WARM_UP, Shape, simulate

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("trl_async_grpo", "trl_grpo", "lora")
GAP = "sampling/sampling_logp_difference/max"
"""GRPOTrainer's own figure of each step, which has weights of its own."""
LOOKED_AT = 8
"""Of AsyncGRPOTrainer's samples every eighth is computed again, with the weights of its versions."""
ENDS = 5
"""Steps at either end whose mean reward is told."""
ETAS, STEPS, BATCH, SLOTS = (0, 1, 4), 24, 32, 8
TOKENS, TAIL, MOST = 32, 0.8, 256
"""Lengths of `staleness`: median, sigma of their log-normal distribution, and where it ends."""


def worker(model: Path, redis: EmbeddedRedis, name: str, slots: int) -> WorkerProcess:
    options = ("--dtype", "float32", "--cpu-threads", "1", "--max-running", str(slots))
    made = WorkerProcess(model, redis.url, model.parent / f"{name}.log", *options, forked=False)
    made.wait_joined()
    return made


# --- the examples -----------------------------------------------------------------------------------------------------


def run_example(name: str, model: Path, redis: EmbeddedRedis) -> dict[str, Any]:
    """One program as its readers run it, with a worker that is killed on the way."""
    from support.trainers.trl import Account, TrainerCallback  # noqa: PLC0415 – TRL is an extra
    from transformers import Trainer  # noqa: PLC0415

    pool = [worker(model, redis, f"{name}-{place}", 64) for place in range(2)]
    account = Account()
    killed: list[int] = []

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
            if not killed and state.global_step >= args.max_steps // 2:
                killed.append(state.global_step)
                pool[1].kill()

    train = Trainer.train

    def watched(trainer: Any, *args: Any, **given: Any) -> Any:
        trainer.add_callback(Kill())
        if hasattr(trainer, "rollout_worker"):
            account.watch(trainer.weight_transfer, trainer.rollout_worker)
        return train(trainer, *args, **given)

    Trainer.train = watched
    began = time.monotonic()
    try:
        made = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        seconds = time.monotonic() - began
    finally:
        Trainer.train = train
        for one in pool:
            one.kill()
    history = made["trainer"].state.log_history
    rewards = [log["reward"] for log in history if "reward" in log]
    keys, account.samples = [sample.key for sample in account.samples], account.samples[::LOOKED_AT]
    gaps = [log[GAP] for log in history if GAP in log] or list(account.logprob_gaps(model).values())
    found = {
        "program": f"examples/{name}.py",
        "steps": len(rewards),
        "seconds": round(seconds, 1),
        "reward_first": mean(rewards[:ENDS]),
        "reward_last": mean(rewards[-ENDS:]),
        "worker_killed_after_step": killed[0],
        "logprob_gap": {"versions": len(gaps), "max": max(gaps)},
        "rewards": [round(it, 3) for it in rewards],
    }
    if (books := made.get("books")) is not None:
        books.check()
        found["books"] = {key: books.report()[key] for key in ("accepted", "trained", "dropped", "in_flight")}
        found["samples_that_came_twice"] = len(keys) - len(set(keys))
    return found


def run_examples(model: Path, redis: EmbeddedRedis, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        yield f"python examples/{name}.py", run_example(name, model, redis)


# --- staleness --------------------------------------------------------------------------------------------------------


def measure(eta: int, model: Path, redis: EmbeddedRedis) -> tuple[dict[str, float], Shape]:
    """An asynchronous loop with this bound: what came of it, and how long its parts took."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    learner = load_tiny_model(model)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-4)
    draw = random.Random(0)

    def jobs() -> Iterator[GenerateJob]:
        for i in itertools.count():
            tokens = max(1, min(MOST, round(TOKENS * draw.lognormvariate(0.0, TAIL))))
            sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            yield GenerateJob(token_ids=[10 + i % 200, 20, 30], min_version=start, sampling=sampling)

    def learn(result: RolloutResult) -> None:
        ids = torch.tensor([*result.prompt_ids, *result.token_ids])  # type: ignore[misc]
        logits = learner(ids[None, :-1]).logits[0, -len(result.token_ids) :]
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[-len(result.token_ids) :, None])[:, 0]
        (-logprobs.mean() / BATCH).backward()

    waited, trained = [], []
    results: list[RolloutResult] = []
    handles = []
    with BlockingRolloutClient(redis.url) as client, WeightPublisher(redis.url) as publisher:
        start = publisher.last_version + 1
        publisher.publish(start, learner.named_parameters()).wait()
        feed = client.feed(Staleness(eta, BATCH), version=start)
        batches = feed.batches(jobs(), timeout=300)
        warm, ages, dropped = max(1, round(STEPS * WARM_UP)), feed.books.staleness.copy(), 0
        for step in range(STEPS):
            if step == warm:
                ages, dropped = feed.books.staleness.copy(), feed.books.dropped.total()
            at = time.monotonic()
            batch = next(batches)
            got = time.monotonic()
            for group in batch:
                for result in group.results:
                    learn(result)
                    results.append(result)
            optimizer.step(), optimizer.zero_grad()
            publishing = time.monotonic()
            handle = publisher.publish(start + step + 1, learner.named_parameters())
            handles.append((handle, time.monotonic() - publishing))
            feed.train(batch)
            feed.advance(start + step + 1)
            waited.append(got - at)
            trained.append(time.monotonic() - got)
        client.cancel_all()
        transfers = [handle.wait(60).seconds - copying for handle, copying in handles]
        new, gone = feed.books.staleness - ages, feed.books.dropped.total() - dropped
    passed = sum(waited[warm:]) + sum(trained[warm:])
    outcome = {
        "samples_per_s": new.total() / passed,
        "trainer_idle": sum(waited[warm:]) / passed,
        "staleness": sum(age * count for age, count in new.items()) / new.total(),
        "max_staleness": max(new),
        "dropped": gone / (gone + new.total()),
    }
    tokens_per_s = sum(len(it.token_ids) for it in results) / sum(it.timings.generating for it in results)
    return outcome, Shape(
        slots=SLOTS, tokens_per_s=tokens_per_s, tokens=TOKENS, tail=TAIL, most_tokens=MOST,
        step_s=mean(trained[warm:]), sync_s=0.0, transfer_s=mean(transfers[warm:]), batch_size=BATCH, group=1,
    )  # fmt: skip


def run_staleness(model: Path, redis: EmbeddedRedis, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    pool = worker(model, redis, "worker", SLOTS)
    try:
        for eta in map(int, names):
            measured, shape = measure(eta, model, redis)
            predicted = asdict(simulate(shape, Staleness(eta, BATCH), 1000))
            told = {
                name: {"measured": rounded(value), "predicted": rounded(predicted[name])}
                for name, value in measured.items()
            }
            yield f"eta={eta}", {**told, "shape": {name: rounded(value) for name, value in asdict(shape).items()}}
    finally:
        pool.kill()


def add_ratios(runs: list[dict[str, Any]]) -> None:
    """Of each run's throughput to the first one's."""
    first = runs[0]["result"]["samples_per_s"]
    for one in runs:
        own = one["result"]["samples_per_s"]
        one["result"]["throughput_ratio"] = {name: rounded(own[name] / first[name]) for name in own}


# --- both -------------------------------------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return rounded(sum(values) / len(values))


def rounded(value: float) -> float:
    return round(value, 4)


def versions() -> dict[str, str]:
    named = ("torch", "sglang", "trl", "transformers", "peft")
    found = {name: importlib.metadata.version(name) for name in named if installed(name)}
    return {"python": platform.python_version(), **found}


def installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["examples", "staleness"])
    parser.add_argument("--host", default=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, no GPU")
    parser.add_argument("--only", default="", help="programs or bounds, with commas; the others stay in the file")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its workers end with it
    out = given.out.absolute()
    told: dict[str, Any] = {
        "what": f"benchmarks/trainers.py {given.what}",
        "date": datetime.now(UTC).date().isoformat(),
        "host": given.host,
        "versions": versions(),
        "runs": [] if not (given.only and out.exists()) else json.loads(out.read_text())["runs"],
    }
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as redis:
        os.chdir(scratch)
        os.environ["ROLLOUTMQ_REDIS"] = redis.url
        model = Path("out/tiny").absolute()
        write_tiny_model(model)
        run, all_names = (run_examples, EXAMPLES) if given.what == "examples" else (run_staleness, ETAS)
        names = given.only.split(",") if given.only else list(map(str, all_names))
        for command, result in run(model, redis, names):
            others = [one for one in told["runs"] if one["command"] != command]
            told["runs"] = [*others, {"command": command, "result": result}]
            if given.what == "staleness":
                add_ratios(told["runs"])
            print(json.dumps({key: value for key, value in result.items() if key != "rewards"}), flush=True)
            out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
