"""Commands on real SGLang, through a pool: a worker process with one engine, whose KV cache is small.

The KV cache holds 2,000 tokens, and the tests want more of it at once: SGLang retracts requests, and goes on.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from support.pools.fixtures import SMALL_RUNNING as RUNNING
from support.pools.worker_process import WorkerProcess, until_running

from rolloutmq import (
    BlockingRolloutClient,
    GenerateJob,
    JobFailed,
    JobHandle,
    RolloutResult,
    SamplingParams,
    WeightPublisher,
)
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.disk.store import SnapshotStore

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
PROMPT = list(range(5, 40))
END_OF_SEQUENCE = 2
"""Of the tiny model."""
T = TypeVar("T")


@pytest.fixture(scope="module")
def model_dir(text_model: Path) -> Path:
    return text_model


@pytest.fixture(scope="module")
def redis_url(small_pool: str) -> str:
    return small_pool


@pytest.fixture(scope="module")
def worker(small_worker: WorkerProcess) -> WorkerProcess:
    return small_worker


@pytest.fixture(scope="module")
def publisher(redis_url: str) -> Iterator[WeightPublisher]:
    with WeightPublisher(redis_url) as publisher:
        yield publisher


@pytest.fixture
def client(worker: WorkerProcess, redis_url: str) -> Iterator[BlockingRolloutClient]:
    with BlockingRolloutClient(redis_url) as client:
        yield client


@pytest.fixture
def tell(worker: WorkerProcess, redis_url: str) -> Callable[[Callable[[PoolControl], Awaitable[Any]]], Any]:
    """Asks the pool's workers something, and waits."""

    def ask(what: Callable[[PoolControl], Awaitable[T]]) -> T:
        async def run() -> T:
            async with PoolControl(redis_url) as control:
                return await what(control)

        return asyncio.run(run())

    return ask


def greedy(count: int, prompt: list[int] = PROMPT, **fields: Any) -> GenerateJob:
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    return GenerateJob(token_ids=prompt, sampling=sampling, **fields)


def start(client: BlockingRolloutClient, count: int, n: int = 4) -> list[JobHandle]:
    """So many that run now, each another prompt."""
    handles = client.submit_many([greedy(count, [*PROMPT, 50 + i]) for i in range(n)])
    until_running(client, n)
    return handles


def tokens(results: list[list[RolloutResult]]) -> list[list[int]]:
    return [each.token_ids.tolist() for group in results for each in group]


@pytest.fixture(scope="module")
def undisturbed(worker: WorkerProcess, redis_url: str) -> list[list[int]]:
    """What `start(client, 400)` generates when nothing happens meanwhile."""
    with BlockingRolloutClient(redis_url) as client:
        return tokens([client.wait(handle, 120) for handle in start(client, 400)])


@pytest.mark.parametrize("mode", ["in_place", "interrupt", "retract"])
def test_a_paused_engine_goes_on_with_the_same_tokens(
    mode: Any, client: BlockingRolloutClient, tell: Any, undisturbed: list[list[int]]
) -> None:
    handles = start(client, 400)
    paused = tell(lambda to: to.pause(mode)).check()
    ((_, answer),) = paused.items()
    assert answer.result["paused"] == mode
    if mode == "in_place":
        assert answer.result["running"] == 4
    late = client.submit(greedy(3))
    state = tell(lambda to: to.version()).check()
    ((_, answer),) = state.items()
    assert (answer.result["state"], answer.result["running"]) == ("paused", 4 if mode == "in_place" else 0)
    tell(lambda to: to.resume()).check()
    assert tokens([client.wait(handle, 120) for handle in handles]) == undisturbed
    assert len(client.wait(late, 60)) == 1


def test_an_engine_that_is_paused_in_place_takes_no_weights_and_generates_nothing(
    client: BlockingRolloutClient, tell: Any, undisturbed: list[list[int]], model_dir: Path, redis_url: str
) -> None:
    handles = start(client, 400)
    tell(lambda to: to.pause("in_place")).check()
    before = client.workers()[0]
    for ask in (lambda to: to.load(str(model_dir), 1), lambda to: to.flush_cache(), lambda to: to.abort()):
        (refused,) = tell(ask).values()
        assert refused.kind == "RequestRefused", refused
    weights = load_tiny_model(model_dir).state_dict()
    with WeightPublisher(redis_url, join_timeout_s=0.5) as publisher:
        assert publisher.publish(publisher.last_version + 1, weights).wait().state in {"failed", "aborted"}
    ((_, answer),) = tell(lambda to: to.version()).check().items()
    told = {name: answer.result[name] for name in ("paused", "running", "version", "in_service")}
    assert told == {"paused": "in_place", "running": 4, "version": before.version, "in_service": True}
    tell(lambda to: to.resume()).check()
    results = [client.wait(handle, 120) for handle in handles]
    assert tokens(results) == undisturbed
    assert {each.versions for group in results for each in group} == {(before.version,)}


def test_the_prefix_cache_is_flushed_beside_running_requests(
    client: BlockingRolloutClient, tell: Any, undisturbed: list[list[int]]
) -> None:
    def cached() -> int:
        return client.wait(client.submit(greedy(2, [7] * 200)), 60)[0].cached_tokens

    assert (cached(), cached() > 150) == (0, True)
    handles = start(client, 400)
    tell(lambda to: to.flush_cache()).check()
    assert tokens([client.wait(handle, 120) for handle in handles]) == undisturbed
    assert cached() == 0


def test_what_a_cpu_and_this_configuration_cannot_do_is_refused_with_the_reason(
    client: BlockingRolloutClient, tell: Any
) -> None:
    for ask, why in (
        (lambda to: to.sleep(), "SGLang gives memory back on GPUs only, and this engine runs on 'cpu'"),
        (lambda to: to.clear_storage(), "enable_hierarchical_cache"),
        (lambda to: to.load_adapter("a", 1, "/nowhere"), "max-lora-rank"),
        (lambda to: to.start_profile(activities=["GPU"]), "there is only 'CPU'"),
        (lambda to: to.stop_profile(), "no profile was started"),
    ):
        (refused,) = tell(ask).values()
        assert (refused.kind, why in refused.error) == ("RequestRefused", True), refused
    assert len(client.wait(client.submit(greedy(4)), 60)) == 1


def test_the_kv_cache_is_what_limits_a_request_and_the_longest_one_runs(client: BlockingRolloutClient) -> None:
    """The model's context is 2,048 tokens. What an engine that was here lately could run would wait for it."""
    with pytest.raises(JobFailed, match=r"the prompt has 35 tokens and the context length \d+") as refused:
        client.wait(client.submit(greedy(2100)), 60)
    (limit,) = map(int, re.findall(r"the context length (\d+)", str(refused.value)))
    assert 1900 < limit < 2000
    for count in (8, 300):
        (result,) = client.wait(client.submit(greedy(count, [3] * (limit - count))), 60)
        assert (result.finish_reason, len(result.token_ids)) == ("length", count)


def test_a_profile_leaves_a_trace(client: BlockingRolloutClient, tell: Any, tmp_path: Path) -> None:
    tell(lambda to: to.start_profile(str(tmp_path / "trace"))).check()
    client.wait(client.submit(greedy(10)), 60)
    (stopped,) = tell(lambda to: to.stop_profile(fetch_bytes=8 << 20)).check().values()
    assert stopped.result["files"]
    for name, size in stopped.result["files"].items():
        content = (tmp_path / "trace" / name).read_bytes()
        assert len(content) == size
        plain = gzip.decompress(content) if name.endswith(".gz") else content
        assert json.loads(plain)["traceEvents"]
        assert stopped.result["fetched"].get(name, content) == content


def test_the_model_as_it_was_loaded_is_audited_saved_and_loaded_as_a_version(
    client: BlockingRolloutClient, tell: Any, model_dir: Path, tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    found = tell(lambda to: to.audit())
    assert found.clean
    (answer,) = found.answers.values()
    assert (answer.result["version"], answer.result["compared"]) == (0, 0)
    assert answer.result["parameters"] > 10
    (saved,) = tell(lambda to: to.save(str(tmp_path))).check().values()
    with SnapshotStore(tmp_path).load(0) as written:
        written.verify()
        assert (Path(saved.result["path"]) / "config.json").exists()
    for path, version in ((Path(saved.result["path"]), 5), (model_dir, 6)):  # smaller numbers may be taken
        handles = start(client, 400)
        (loaded,) = tell(lambda to, path=path, version=version: to.load(str(path), version)).check().values()
        assert loaded.result["verified"]
        for handle, expected in zip(handles, undisturbed, strict=True):
            (result,) = client.wait(handle, 120)
            assert result.token_ids.tolist() == expected  # the same weights under another number
            assert result.versions[-1] == version
        assert tell(lambda to: to.audit()).clean


def test_a_version_of_the_trainers_is_compared_saved_and_had_again(
    client: BlockingRolloutClient, tell: Any, publisher: WeightPublisher, model_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    base = {name: tensor for file in model_dir.glob("*.safetensors") for name, tensor in load_file(file).items()}
    tensors = {name: (tensor * 1.25 if tensor.dim() > 1 else tensor).float() for name, tensor in base.items()}
    assert publisher.publish(10, tensors.items()).wait(60).state == "committed"
    expected = [each.token_ids.tolist() for each in client.wait(client.submit(greedy(40)), 60)]
    found = tell(lambda to: to.audit())
    (answer,) = found.answers.values()
    assert found.clean
    assert answer.result["compared"] >= len(tensors) - 1  # a tied head may be there under one name only

    (plain,) = tell(lambda to: to.save(str(tmp_path))).check().values()
    (sharded,) = tell(lambda to: to.save(str(tmp_path), format="sharded")).check().values()
    assert plain.result["of_the_trainer"]
    for name, tensor in load_file(next(Path(plain.result["path"]).glob("*.safetensors"))).items():
        assert tensor.equal(tensors[name])
    assert publisher.publish(11, base.items()).wait(60).state == "committed"
    changed = [each.token_ids.tolist() for each in client.wait(client.submit(greedy(40)), 60)]
    assert changed != expected
    for path, version, kind in ((plain, 20, "snapshot"), (sharded, 21, "sharded")):
        folder = path.result["path"]
        (loaded,) = tell(lambda to, f=folder, v=version: to.load(f, v)).check().values()
        assert loaded.result["format"] == kind
        results = client.wait(client.submit(greedy(40)), 60)
        assert [each.versions for each in results] == [(version,)]
        assert [each.token_ids.tolist() for each in results] == expected
        assert tell(lambda to: to.audit()).clean

    content = bytearray(next(Path(sharded.result["path"]).glob("*.safetensors")).read_bytes())
    content[-1] ^= 1
    next(Path(sharded.result["path"]).glob("*.safetensors")).write_bytes(content)
    (refused,) = tell(lambda to: to.load(sharded.result["path"], 30)).values()
    assert "is not as it was saved" in refused.error
    assert [each.versions for each in client.wait(client.submit(greedy(4)), 60)] == [(21,)]


@pytest.mark.slow
def test_more_than_the_kv_cache_holds_and_a_killed_scheduler_and_all_is_answered_once(
    client: BlockingRolloutClient, worker: WorkerProcess, tell: Any
) -> None:
    # 12 at a time want 5,200 tokens. Of those with ignore_eos SGLang knows that, and admits fewer.
    endless = SamplingParams(max_new_tokens=400, temperature=0.0, logit_bias={END_OF_SEQUENCE: -100.0})
    jobs = client.submit_many(GenerateJob(token_ids=[*PROMPT, 50 + i], sampling=endless) for i in range(20))
    seen: set[str] = set()
    for outcome in client.results(timeout=240):
        assert isinstance(outcome, RolloutResult), outcome
        assert (len(outcome.token_ids), outcome.job_id in seen) == (400, False)
        seen.add(outcome.job_id)
        if len(seen) == 5:
            scheduler = max(
                (each for each in worker.family()[1:] if each.is_running()), key=lambda each: each.memory_info().rss
            )
            scheduler.send_signal(signal.SIGKILL)
    assert seen == {job.job_id for job in jobs}
    assert "KV cache pool is full. Retract requests." in worker.text()
    (status,) = client.workers()
    assert status.engine_restarts == 1
    (answer,) = tell(lambda to: to.version()).check().values()
    assert answer.result["slots"] < RUNNING + 1
    assert answer.result["version"] == 11  # what the trainer has committed, not what the operator had loaded


def test_a_stopped_worker_leaves_no_process(worker: WorkerProcess, tell: Any, client: BlockingRolloutClient) -> None:
    family = worker.family()
    assert len(family) > 1
    handle = client.submit(greedy(1500))
    until_running(client, 1)
    assert tell(lambda to: to.stop(drain_s=0.5, timeout=30.0)).ok
    assert worker.process.wait(60) == 0
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert client.workers() == []
    assert client.cancel([handle.job_id]) == ["ok"]  # it is back in the pool, with what it had
