"""An asynchronous training loop beside a synchronous one: the same model, prompts, lengths and update, in one run.

    python -m benchmarks overlap --shape 0.6b --device cuda --out benchmarks/results/overlap-2xh200.json

The trainer has the first GPU, one worker with SGLang the second. Both loops do what a reinforcement learning loop does:
they take `--prompts` groups of `--samples` samples, learn from them (truncated importance sampling), and publish the
weights. The synchronous loop waits for its batch, and until the pool serves its weights. The asynchronous one trains on
what comes first, through `client.feed(Staleness(eta, ...))`. The lengths are log-normal and fixed for each prompt. Both
loops get the same prompts. They alternate (sync, async, async, sync), so that a host that gets slower affects both.

With `--reproducible` the asynchronous loop is compared with itself under a reproducible feed instead, both with
deterministic engines and without stale samples (async, reproducible, reproducible, async).

`trainer_waits` is the share of time in which the trainer waits for samples or for its weights to be served.
`gpu_idle` is the share of time without a kernel, as the driver counts it (utilization.gpu), of each GPU.
"""

from __future__ import annotations

import itertools
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rolloutmq import BlockingRolloutClient, GenerateJob, RolloutResult, SamplingParams, Staleness, WeightPublisher
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.producer.training import OnStale
from rolloutmq.worker.cpu_support import prepare_transformers

from .harness import Run, option
from .sync.shapes import one_shape
from .workers import working

PROMPT_TOKENS = 64
TAIL = 0.8
"""Sigma of the lengths' log-normal distribution."""
TOKENS_PER_PASS = 16384
"""Of a forward and backward pass, padded."""
TRUNCATE = 2.0
LOOK_MS = 100
ON_GPU = (
    "max_total_tokens=1000000",
    "attention_backend=triton",
    "sampling_backend=pytorch",
    "disable_prefill_cuda_graph=true",
    "enable_prefill_delayer=true",
)


@dataclass(slots=True)
class Busy:
    """Percent of time with a kernel, of each GPU, every LOOK_MS milliseconds, as nvidia-smi tells it."""

    seen: list[tuple[float, int, int]] = field(default_factory=list)

    def watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits"]
        looking = subprocess.Popen([*command, "-lms", str(LOOK_MS)], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(looking,), daemon=True).start()

    def _read(self, looking: subprocess.Popen[str]) -> None:
        assert looking.stdout is not None
        for line in looking.stdout:
            gpu, percent = map(int, line.split(","))
            self.seen.append((time.monotonic(), gpu, percent))

    def idle(self, began: float, ended: float) -> dict[str, float]:
        found: dict[int, list[int]] = {}
        for at, gpu, percent in self.seen:
            if began <= at <= ended:
                found.setdefault(gpu, []).append(percent)
        return {f"gpu{gpu}": round(1 - statistics.mean(shares) / 100, 3) for gpu, shares in sorted(found.items())}


class Learner:
    """The trainer's model, from random weights in bfloat16, and one optimiser step on a batch."""

    def __init__(self, folder: Path, device: str) -> None:
        prepare_transformers()
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=device != "cpu")

    def step(self, groups: list[list[RolloutResult]]) -> None:
        """Learn from groups of samples, in passes of at most TOKENS_PER_PASS tokens with their padding."""
        scored = [(result, advantage) for group in groups for result, advantage in with_advantages(group)]
        scored.sort(key=lambda pair: len(pair[0].token_ids))
        while scored:
            longest = PROMPT_TOKENS + len(scored[-1][0].token_ids)
            fitting = max(1, TOKENS_PER_PASS // longest)
            self._learn(scored[-fitting:])
            del scored[-fitting:]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _learn(self, scored: list[tuple[RolloutResult, float]]) -> None:
        longest = max(len(result.token_ids) for result, _ in scored)
        ids = torch.zeros(len(scored), PROMPT_TOKENS + longest, dtype=torch.long)
        then, mask = torch.zeros(len(scored), longest), torch.zeros(len(scored), longest)
        for row, (result, _) in enumerate(scored):
            count = len(result.token_ids)
            ids[row, : PROMPT_TOKENS + count] = torch.tensor([*result.prompt_ids, *result.token_ids])  # type: ignore[misc]
            then[row, :count], mask[row, :count] = torch.tensor(result.logprobs), 1.0
        ids, then, mask = ids.to(self.device), then.to(self.device), mask.to(self.device)
        advantages = torch.tensor([advantage for _, advantage in scored], device=self.device)
        logits = self.model(ids[:, :-1], logits_to_keep=longest).logits
        now = -torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, -longest:].flatten(), reduction="none"
        ).view_as(then)
        weight = torch.exp(now.detach() - then).clamp(max=TRUNCATE)
        (-(advantages[:, None] * weight * now * mask).sum() / mask.sum()).backward()


def with_advantages(group: list[RolloutResult]) -> Iterator[tuple[RolloutResult, float]]:
    """Each sample with its reward, the share of even ids, less the group's mean."""
    rewards = [float((result.token_ids % 2 == 0).mean()) for result in group]
    mean = statistics.mean(rewards)
    yield from ((result, reward - mean) for result, reward in zip(group, rewards, strict=True))


@dataclass(frozen=True, slots=True)
class Loops:
    given: Plan
    url: str
    learner: Learner
    publisher: WeightPublisher
    busy: Busy
    vocabulary: int

    def jobs(self, seed: int) -> Iterator[GenerateJob]:
        draw = random.Random(seed)
        for _ in itertools.count():
            tokens = max(1, min(self.given.most, round(self.given.tokens * draw.lognormvariate(0.0, TAIL))))
            yield GenerateJob(
                token_ids=[draw.randrange(self.vocabulary) for _ in range(PROMPT_TOKENS)],
                n=self.given.samples,
                sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
                min_version=self.publisher.last_version,
            )

    def publish(self, after: Any = None) -> Any:
        return self.publisher.publish(
            self.publisher.last_version + 1, self.learner.model.named_parameters(), after=after
        )

    def publish_and_wait(self) -> None:
        report = self.publish().wait(120)
        assert report.state == "committed", report

    def sync(self, seed: int) -> dict[str, Any]:
        """Generate, learn, publish, one after the other."""
        jobs, clock = self.jobs(seed), Clock()
        with BlockingRolloutClient(self.url) as client:
            for step in range(self.given.warm + self.given.steps):
                if step == self.given.warm:
                    clock = Clock()
                with clock.waiting():
                    client.submit_many(list(itertools.islice(jobs, self.given.prompts)))
                    batch = [list(group.results) for group in client.groups(timeout=300)]
                self.learner.step(batch)
                with clock.waiting():
                    self.publish_and_wait()
                clock.count(batch)
        return clock.told(self.busy)

    def asynchronous(self, seed: int, *, reproducible: bool = False) -> dict[str, Any]:
        """Learn from what comes first, while the pool generates what comes next; or from what the schedule says."""
        self.publish_and_wait()
        clock = Clock()
        with BlockingRolloutClient(self.url) as client:
            on_stale: OnStale = "wait" if self.given.reproducible else "drop"
            staleness = Staleness(self.given.eta, self.given.prompts * self.given.samples, on_stale)
            feed = client.feed(staleness, version=self.publisher.last_version, reproducible=reproducible)
            batches = feed.batches(self.jobs(seed), timeout=300)
            for step in range(self.given.warm + self.given.steps):
                if step == self.given.warm:
                    clock, ages, gone = Clock(), feed.books.staleness.copy(), feed.books.dropped.total()
                with clock.waiting():
                    groups = next(batches)
                batch = [list(group.results) for group in groups]
                self.learner.step(batch)
                self.publish(feed.sampled(self.publisher.last_version + 1) if reproducible else None)
                feed.train(groups)
                feed.advance(self.publisher.last_version)
                clock.count(batch)
            told = clock.told(self.busy)
            new = feed.books.staleness - ages
            client.cancel_all()
        told["staleness"] = round(sum(age * count for age, count in new.items()) / new.total(), 2)
        return told | {"dropped": feed.books.dropped.total() - gone}


class Clock:
    """Of one loop: when it began, how long it waited, and how much it learned from."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.waited = 0.0
        self.samples = self.tokens = self.steps = 0
        self._since = 0.0

    def waiting(self) -> Clock:
        return self

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.waited += time.monotonic() - self._since

    def count(self, batch: list[list[RolloutResult]]) -> None:
        self.steps += 1
        self.samples += sum(map(len, batch))
        self.tokens += sum(len(result.token_ids) for group in batch for result in group)

    def told(self, busy: Busy) -> dict[str, Any]:
        ended = time.monotonic()
        seconds = ended - self.began
        return {
            "samples_per_s": round(self.samples / seconds, 2),
            "tokens_per_s": round(self.tokens / seconds),
            "tokens_per_sample": round(self.tokens / self.samples),
            "seconds_per_step": round(seconds / self.steps, 2),
            "trainer_waits": round(self.waited / seconds, 3),
            "gpu_idle": busy.idle(self.began, ended),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    shape: str = option("tiny", "One of `python -m benchmarks sync --shapes`.")
    device: str = option("cpu", "cpu, or cuda, which takes two GPUs.")
    prompts: int = option(32, "Groups of a batch.", min=1)
    samples: int = option(8, "Samples of a group.", min=1)
    tokens: int = option(512, "Median length of a sample.", min=1)
    most: int = option(3072, "Where that distribution ends.", min=1)
    eta: int = option(4, "Bound of the asynchronous loop's staleness.", min=0)
    reproducible: bool = option(False, "Compare a reproducible feed with a free one.")
    max_running: int = option(512, "Samples that the engine runs at a time.", min=1)
    warm: int = option(2, "Steps of each block that do not count.", min=1)
    steps: int = option(8, "Steps of each block that count.", min=1)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """An asynchronous training loop beside a synchronous one, with the same model, prompts, lengths and update."""
    shape, blocks, on_gpu = one_shape(plan.shape), list[dict[str, Any]](), plan.device != "cpu"
    options = ["--dtype=bfloat16", f"--max-running={plan.max_running}", "--load-format=dummy"]
    options += ["--deterministic"] * plan.reproducible
    options += (f"--sglang={setting}" for setting in (ON_GPU if on_gpu else ("max_total_tokens=32768",)))
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as redis:
        folder = Path(scratch)
        shape.write(folder)
        with working(folder, redis.url, folder / "worker.log", *options, gpu="1" if on_gpu else "") as worker:
            learner, busy = Learner(folder, "cuda:0" if on_gpu else "cpu"), Busy()
            if on_gpu:
                busy.watch()
            with BlockingRolloutClient(redis.url) as client:
                worker.until_serving(client)
            with WeightPublisher(redis.url) as publisher:
                loops = Loops(plan, redis.url, learner, publisher, busy, shape.vocab - 2)
                loops.publish_and_wait()
                one, other = ("async", "reproducible") if plan.reproducible else ("sync", "async")
                for name, seed in ((one, 0), (other, 0), (other, 1), (one, 1)):
                    kept = name == "reproducible"
                    told = loops.sync(seed) if name == "sync" else loops.asynchronous(seed, reproducible=kept)
                    blocks.append({"loop": name, **told})
                    run.say(**blocks[-1])
                    run.keep({"blocks": blocks})
    units = ("samples_per_s", "tokens_per_s")
    return {f"{other}_to_{one}": {unit: ratio(blocks, unit, other, one) for unit in units}, "blocks": blocks}


def ratio(blocks: list[dict[str, Any]], unit: str, other: str, one: str) -> float:
    """The mean rate of the blocks with one loop to that of the blocks with the other."""
    means = [statistics.mean(block[unit] for block in blocks if block["loop"] == name) for name in (other, one)]
    return float(round(means[0] / means[1], 3))
