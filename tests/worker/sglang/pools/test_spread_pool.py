"""Real engines share what comes, also with one that comes late; transformers is the judge of every token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis
from support.pools.in_place import prompts
from support.pools.operations import until
from support.pools.worker_process import WorkerProcess

from rolloutmq import BlockingRolloutClient, GenerateJob, RolloutResult, SamplingParams
from rolloutmq.messages.redis import Keys
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]
WORKERS = 4
OPTIONS = ("--dtype", "float32", "--drain", "5", "--max-total-tokens", "80000", "--lease", "30")
KEYS = Keys("default")
TOLERANCE = 2e-3
"""Of a log-probability; both sides compute in float32, in batches of different shapes."""
AT_ONCE = 32
"""Sequences that the judge computes together."""


class Pool:
    """Worker processes, and what each of them holds, as Redis has it now. The last one comes late: it is frozen."""

    def __init__(self, workers: list[WorkerProcess], url: str) -> None:
        self.workers, self.url = workers, url
        self._db = redis.Redis.from_url(url)
        os.killpg(workers[-1].process.pid, signal.SIGSTOP)
        self._db.zadd(KEYS.workers, {workers[-1].worker_id: 1}, xx=True)  # its lease is over
        until(self._take_part)

    @contextmanager
    def engines_stand_still(self) -> Iterator[None]:
        """On few cores engines that compute would keep their workers from claiming in time."""
        engines = [process for one in self.workers[:-1] for process in one.family()[1:]]
        for process in engines:
            process.suspend()
        yield
        for process in engines:
            process.resume()

    def thaw(self) -> None:
        os.killpg(self.workers[-1].process.pid, signal.SIGCONT)

    def _take_part(self) -> bool:
        """Whether all but the last one have looked for work, and that one is not there."""
        return set(self._db.hkeys(KEYS.takers)) == {one.worker_id.encode() for one in self.workers[:-1]}

    def jobs(self) -> list[set[bytes]]:
        with self._db.pipeline() as pipe:
            for one in self.workers:
                pipe.smembers(KEYS.held(one.worker_id))
            return [set(ids) for ids in pipe.execute()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_tiny_model(path, dtype="float32")
    return path


@pytest.fixture
def pool(model: Path, redis_server: EmbeddedRedis) -> Iterator[Pool]:
    url = redis_server.url
    with ExitStack() as stack:
        workers = [WorkerProcess(model, url, model.with_name(f"{i}.log"), *OPTIONS) for i in range(WORKERS + 1)]
        for one in workers:
            stack.callback(one.kill)
        for one in workers:
            one.wait_joined()
        yield Pool(workers, url)


def batch(jobs: int, n: int, count: int) -> list[GenerateJob]:
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    return [GenerateJob(token_ids=prompt, n=n, sampling=sampling) for prompt in prompts(jobs, 24, jobs)]


def results_of(client: BlockingRolloutClient, jobs: Sequence[GenerateJob]) -> list[RolloutResult]:
    """Every sample of these jobs, once."""
    found = [outcome for outcome in client.results(timeout=200) if isinstance(outcome, RolloutResult)]
    assert sorted((one.job_id, one.sample) for one in found) == sorted((it.id, k) for it in jobs for k in range(it.n))
    return found


def check(model: Path, jobs: Sequence[GenerateJob], results: Sequence[RolloutResult]) -> None:
    """Each token is the most likely one, with its log-probability."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    judge = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    prompt_of = {it.id: [*it.token_ids] for it in jobs if it.token_ids is not None}
    for at in range(0, len(results), AT_ONCE):
        some = results[at : at + AT_ONCE]
        sequences = torch.tensor([[*prompt_of[one.job_id], *one.token_ids.tolist()] for one in some])
        count = len(some[0].token_ids)
        with torch.no_grad():
            expected = torch.log_softmax(judge(sequences).logits[:, -count - 1 : -1].float(), -1)
        chosen = expected.gather(-1, sequences[:, -count:, None])[..., 0].numpy()
        said = np.stack([one.logprobs for one in some if one.logprobs is not None])
        np.testing.assert_allclose(said, chosen, atol=TOLERANCE)
        np.testing.assert_allclose(chosen, expected.max(-1).values.numpy(), atol=TOLERANCE)


def test_four_share_every_batch_and_a_fifth_gets_its_fifth_of_what_runs(pool: Pool, model: Path) -> None:
    jobs: list[GenerateJob] = []

    def loads() -> list[int]:
        n = {it.id.encode(): it.n for it in jobs}
        return [sum(n[id] for id in ids) for ids in pool.jobs()]

    with BlockingRolloutClient(pool.url) as client:
        with pool.engines_stand_still():
            for count, n in [(32, 1), (16, 8), (128, 1), (64, 8)]:
                jobs += batch(count, n, 200)
                client.submit_many(jobs[-count:])
                samples = sum(it.n for it in jobs)
                until(lambda samples=samples: sum(loads()) == samples)
                *found, late = loads()
                assert max(found) <= max(1.25 * min(found), min(found) + n), found
                assert late == 0
            assert client.load().attempts == len(jobs), "nothing was moved"
        pool.thaw()
        held = until(lambda: (now := loads())[-1] >= sum(now) / (WORKERS + 1) / 1.25 and now)
        assert 0 < held[-1] <= 1.25 * sum(held) / (WORKERS + 1), held
        results = results_of(client, jobs)
        load = client.load()
    assert any(one.legs for one in results if one.worker_id == pool.workers[-1].worker_id), "they went on there"
    assert (load.redelivered, load.dead) == (0, 0)
    check(model, jobs, results)
