"""In-place updates on real parts: publisher, Redis, a worker process with SGLang; what results say of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.pools.in_place import Judge, check_crossing, prompts, write_versions
from support.pools.worker_process import WorkerProcess, until_running

from rolloutmq import BlockingRolloutClient, GenerateJob, JobHandle, SamplingParams, WeightPublisher
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.replay import Recorded, Settings
from rolloutmq.ops.replay.checks import score

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]
RUNNING = 6
TOKENS = 1000
TOLERANCE = 2e-3
"""Of a log-probability; both sides compute in float32, in batches of different shapes."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    return write_versions(tmp_path_factory.mktemp("in-place-pool"), 3)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def worker(versions: list[Path], redis_url: str) -> Iterator[WorkerProcess]:
    options = ("--dtype", "float32", "--max-running", str(RUNNING + 1), "--drain", "5")
    started = WorkerProcess(versions[0], redis_url, versions[0].with_name("worker.log"), *options)
    try:
        started.wait_joined()
        yield started
    finally:
        started.kill()


def submit(client: BlockingRolloutClient, asked: list[list[int]], count: int) -> list[JobHandle]:
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    return client.submit_many(GenerateJob(token_ids=prompt, sampling=sampling) for prompt in asked)


def publish(publisher: WeightPublisher, version: int, versions: list[Path], worker: WorkerProcess) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    report = publisher.publish(version, load_file(versions[version])).wait(60)
    assert (report.state, report.workers, report.failures) == ("committed", (worker.worker_id,), {})


def test_results_say_exactly_which_weights_sampled_each_token_of_kept_kv(
    worker: WorkerProcess, redis_url: str, versions: list[Path]
) -> None:
    """Two updates under running requests: tokens after each extend the KV that older weights left."""
    judge, [*asked, other] = Judge(versions), prompts(RUNNING + 1)
    with (
        BlockingRolloutClient(redis_url) as client,
        WeightPublisher(redis_url, mode="in_place", bucket_bytes=200_000) as publisher,
    ):
        jobs = submit(client, asked, TOKENS)
        until_running(client, RUNNING)
        for version in range(3):
            if version:
                publish(publisher, version, versions, worker)
            # A prompt that older weights have left in the cache; and while it runs the others get their tokens too.
            (beside,) = client.wait(submit(client, [other], 24)[0], 60)
            assert beside.versions == (version,)
            assert judge.error(other, beside, [(version, 24)]) < TOLERANCE
        results = [client.wait(job, 120)[0] for job in jobs]
        certain = 0
        for prompt, result in zip(asked, results, strict=True):
            assert (result.versions, len(result.token_ids)) == ((0, 1, 2), TOKENS)
            assert result.attempt == 1
            certain += check_crossing(judge, prompt, result, list(result.segments), TOLERANCE)
        assert certain >= RUNNING // 2  # the counts are exact, not only about right
        # What is cached of these prompts is of no one version: it is not used again.
        for prompt, job in zip(asked, submit(client, asked, 24), strict=True):
            (result,) = client.wait(job, 60)
            assert result.versions == (2,)
            assert judge.error(prompt, result, [(2, 24)]) < TOLERANCE


def test_auto_computes_few_tokens_anew_and_switches_under_many(
    worker: WorkerProcess, redis_url: str, versions: list[Path], tmp_path: Path
) -> None:
    """The first update comes when little has run. Each token is rebuilt on the cache that results say it had."""
    from safetensors.torch import load_file  # noqa: PLC0415

    asked = prompts(RUNNING, seed=7)
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True)
    jobs = [GenerateJob(token_ids=prompt, sampling=sampling) for prompt in asked]
    snapshots = str(tmp_path)
    with (
        BlockingRolloutClient(redis_url) as client,
        WeightPublisher(redis_url, mode="auto", snapshots=snapshots, keep_snapshots=10) as publisher,
    ):
        files = [versions[0] / "model.safetensors", *versions[1:]]
        for place in range(4):  # the first one while nothing runs
            report = publisher.publish(publisher.last_version + 1, load_file(files[place % len(files)])).wait(60)
            assert (report.state, report.workers) == ("committed", (worker.worker_id,))
            if not place:
                handles = client.submit_many(jobs)
                until_running(client, RUNNING)
        results = [client.wait(handle, 120)[0] for handle in handles]
    for result in results:
        assert len(result.versions) == 4
        assert result.legs
        assert result.in_place
        assert result.attempt == 1
    samples = [Recorded(result, job, 0.0) for result, job in zip(results, jobs, strict=True)]
    verdicts = score(samples, Settings(model=str(versions[0]), snapshots=tmp_path))
    assert [verdict.state for verdict in verdicts] == ["same"] * RUNNING, [verdict.reasons for verdict in verdicts]
    assert max(verdict.largest_gap for verdict in verdicts) < 1e-5


def test_what_wants_exactly_one_version_leaves_at_the_switch(
    worker: WorkerProcess, redis_url: str, versions: list[Path]
) -> None:
    """Its tokens are all of its version, by a forward pass, while another request beside it crosses over."""
    from safetensors.torch import load_file  # noqa: PLC0415

    judge, [mine, other, beside] = Judge(versions), prompts(3, seed=9)
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with (
        BlockingRolloutClient(redis_url) as client,
        WeightPublisher(redis_url, mode="in_place", bucket_bytes=200_000) as publisher,
    ):
        version = publisher.last_version + 1
        publisher.publish(version, load_file(versions[1])).wait(60)
        exact = client.submit(GenerateJob(token_ids=mine, sampling=sampling, exact_version=version))
        (crossing,) = submit(client, [other], TOKENS)
        until_running(client, 2)
        client.wait(submit(client, [beside], 24)[0], 60)  # the two get their tokens meanwhile
        report = publisher.publish(version + 1, load_file(versions[2])).wait(60)
        assert (report.state, report.workers) == ("committed", (worker.worker_id,))
        client.stop([exact])
        (kept,), (crossed,) = client.wait(exact, 60), client.wait(crossing, 120)
        assert (crossed.versions, bool(crossed.in_place)) == ((version, version + 1), True)
        assert (kept.versions, kept.finish_reason) == ((version,), "abort")
        assert 0 < (count := len(kept.token_ids)) < TOKENS
        assert judge.error(mine, kept, [(1, count)]) < TOLERANCE
        (after,) = client.wait(client.submit(GenerateJob(token_ids=mine, sampling=sampling, exact_version=version + 1)))
        assert after.versions == (version + 1,)
        assert judge.error(mine, after, [(2, TOKENS)]) < TOLERANCE
