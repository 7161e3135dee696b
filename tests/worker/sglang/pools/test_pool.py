"""The whole path on real parts: client, Redis, worker processes with SGLang, weights; transformers is the judge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.pools.operations import until
from support.pools.worker_process import COMMAND, WorkerProcess, until_running

from rolloutmq import (
    BlockingRolloutClient,
    FeatureUnavailable,
    GenerateJob,
    JobFailed,
    RolloutResult,
    SamplingParams,
    WeightPublisher,
)
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.cpu_support import prepare_transformers

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
PROMPT = list(range(5, 40))
OPTIONS = ("--dtype", "bfloat16", "--max-running", "16", "--drain", "5")
TOLERANCE = 0.02
"""Of a log-probability, between SGLang in bfloat16 and transformers in float32 on the same bfloat16 weights."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "model"
    write_tiny_model(path, context=2048)
    return path


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def workers(model_dir: Path, redis_url: str) -> Iterator[list[WorkerProcess]]:
    """Two workers; the tests below use them up in order."""
    started = [WorkerProcess(model_dir, redis_url, model_dir.parent / f"{i}.log", *OPTIONS) for i in range(2)]
    try:
        for worker in started:
            worker.wait_joined()
        yield started
    finally:
        for worker in started:
            worker.kill()


@pytest.fixture(scope="module")
def publisher(redis_url: str) -> Iterator[WeightPublisher]:
    """The trainer, alive throughout: an engine that is restarted catches up from what it retains."""
    with WeightPublisher(redis_url) as publisher:
        yield publisher


@pytest.fixture(scope="module")
def versions(model_dir: Path) -> dict[int, Any]:
    """transformers models: version 0 as on disk, later ones as they are published below; all with bfloat16 values."""
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import Qwen2ForCausalLM  # noqa: PLC0415

    models = {}
    for version in range(4):
        model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                if version:
                    parameter.add_(0.3 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
        models[version] = model.float().eval()
    return models


def logprobs_of(model: Any, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
    """(n, vocabulary): the reference's log-probabilities at each generated position."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0].float()
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].numpy()


def assert_greedy(result: RolloutResult, versions: dict[int, Any]) -> None:
    """Each token is the most likely one, with its log-probability, under the version its segment names."""
    start = 0
    for version, count in result.segments:
        expected = logprobs_of(versions[version], PROMPT, result.token_ids)[start : start + count]
        tokens = result.token_ids[start : start + count]
        chosen = expected[np.arange(count), tokens]
        np.testing.assert_allclose(result.logprobs[start : start + count], chosen, atol=TOLERANCE)
        # Where two tokens are closer than the tolerance either is greedy.
        np.testing.assert_allclose(chosen, expected.max(-1), atol=2 * TOLERANCE)
        start += count
    assert start == len(result.token_ids)


def greedy(max_new_tokens: int, **fields: Any) -> GenerateJob:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return GenerateJob(token_ids=PROMPT, sampling=sampling, **fields)


def publish(publisher: WeightPublisher, version: int, versions: dict[int, Any], expect: int) -> None:
    import torch  # noqa: PLC0415

    tensors = [(name, tensor.to(torch.bfloat16)) for name, tensor in versions[version].state_dict().items()]
    report = publisher.publish(version, tensors).wait(60)
    assert (report.state, len(report.workers), report.failures) == ("committed", expect, {})


def test_greedy_tokens_equal_transformers_before_and_after_an_update(
    workers: list[WorkerProcess], redis_url: str, versions: dict[int, Any], publisher: WeightPublisher
) -> None:
    with BlockingRolloutClient(redis_url) as client:
        for version in (0, 1):
            if version:
                publish(publisher, version, versions, expect=len(workers))
            results = client.wait(client.submit(greedy(40, n=8)), 60)
            assert [result.versions for result in results] == [(version,)] * 8
            for result in results:
                assert_greedy(result, versions)


@pytest.mark.parametrize("mode", ["drain", "resume"])
def test_samples_that_run_when_an_update_comes_say_which_weights_sampled_each_token(
    mode: UpdateMode,
    workers: list[WorkerProcess],
    redis_url: str,
    versions: dict[int, Any],
    publisher: WeightPublisher,
) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(BlockingRolloutClient(redis_url))
        if mode == "drain":
            publisher = stack.enter_context(WeightPublisher(redis_url, mode="drain", join_timeout_s=60.0))
        version = 1 + max(worker.version for worker in client.workers())
        job = client.submit(greedy(700, n=12))
        until_running(client, 12)
        publish(publisher, version, versions, expect=len(workers))
        results = client.wait(job, 120)
        later = client.wait(client.submit(greedy(40, n=4)), 60)
    crossed = (version - 1,) if mode == "drain" else (version - 1, version)
    assert [result.versions for result in results] == [crossed] * 12
    assert [result.versions for result in later] == [(version,)] * 4
    for result in results:
        assert len(result.token_ids) == 700
    for result in (*results, *later):
        assert_greedy(result, versions)


def test_a_request_the_engine_cannot_run_is_refused_by_name(workers: list[WorkerProcess], redis_url: str) -> None:
    with BlockingRolloutClient(redis_url) as client:
        too_long = client.submit(greedy(4000))
        unknown = client.submit(GenerateJob(token_ids=[5, 999_999]))
        with pytest.raises(FeatureUnavailable, match="lora='adapter'"):
            client.submit(greedy(4, lora="adapter"))
        for job, name in ((too_long, "max_new_tokens"), (unknown, "999999")):
            with pytest.raises(JobFailed, match=name):
                client.wait(job, 60)
        assert len(client.wait(client.submit(greedy(4, n=2)), 60)) == 2


@pytest.mark.slow
def test_submit_answers_every_line_once_though_it_is_stopped_and_started(
    workers: list[WorkerProcess], redis_url: str, tmp_path: Path
) -> None:
    lines = [{"text": f"Question {i}: how far is it?"} for i in range(300)]
    lines[7] = {"messages": [{"role": "user", "content": "And back?"}]}
    lines[8] = {"token_ids": [5, 6, 7], "n": 3}
    source, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    part = tmp_path / "answers.jsonl.part"
    command = [*COMMAND, "submit", str(source), "--out", str(out), "--redis", redis_url, "--max-new-tokens", "24"]
    first = subprocess.Popen([*command, "--window", "64"], stderr=subprocess.DEVNULL)
    while not part.exists() or part.read_bytes().count(b"\n") < 40:
        assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert first.wait(20) == 130
    assert not out.exists()
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode == 0
    answers = [json.loads(line) for line in out.read_bytes().splitlines()]
    expected = [(i + 1, k) for i in range(300) for k in range(3 if i == 8 else 1)]
    assert [(answer["line"], answer["sample"]) for answer in answers] == expected
    assert all(answer["text"] for answer in answers if "prompt" in answer and answer["finish_reason"] == "length")
    assert not part.exists()
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_a_killed_worker_loses_nothing_and_a_dead_engine_is_restarted(
    workers: list[WorkerProcess], redis_url: str, publisher: WeightPublisher, versions: dict[int, Any]
) -> None:
    newest = publisher.last_version
    with BlockingRolloutClient(redis_url) as client:
        jobs = client.submit_many(greedy(200, n=2) for _ in range(24))
        until_running(client, 1, on_each=True)
        workers[0].kill()
        survivor = workers[1]
        scheduler = max(
            (child for child in survivor.family()[1:] if child.is_running()), key=lambda child: child.memory_info().rss
        )
        # The survivor's engine dies too, while it works on what the first one left.
        seen: set[tuple[str, int]] = set()
        for outcome in client.results(timeout=120):
            assert isinstance(outcome, RolloutResult), outcome
            # The restarted engine has the weights from disk; it may not serve before it has caught up.
            assert outcome.versions == (newest,)
            seen.add((outcome.job_id, outcome.sample))
            if len(seen) == 8:  # of 48: the others have not all come when the signal has its effect
                scheduler.send_signal(signal.SIGKILL)
                assert_greedy(outcome, versions)
        assert seen == {(job.job_id, sample) for job in jobs for sample in range(2)}
        # The killed worker stays on the list until its lease is over.
        until(lambda: [worker.engine_restarts for worker in client.workers()] == [1])


@pytest.mark.slow
def test_the_trainer_example_runs_as_written(
    workers: list[WorkerProcess], redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tiny").symlink_to(model_dir)
    example = Path(__file__).parents[4] / "examples" / "trainer.py"
    environment = os.environ | {"ROLLOUTMQ_REDIS": redis_url}
    ran = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    versions = [int(line.split()[1].rstrip(":")) for line in ran.stdout.splitlines() if line.startswith("version")]
    assert versions == list(range(versions[0], versions[0] + 10))


def test_sigterm_hands_back_what_does_not_fit_and_leaves_nothing_behind(
    workers: list[WorkerProcess], redis_url: str
) -> None:
    worker = workers[1]
    with BlockingRolloutClient(redis_url) as client:
        client.submit_many(greedy(1900, n=8) for _ in range(8))
        until_running(client, 1)
        family = worker.family()
        assert worker.terminate(20) == 0
        assert client.workers() == []
        load = client.load()
        assert (load.open_jobs, sum(load.queued)) == (8, 8)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process.pid for process in alive if process.pid != os.getpid()] == []


@pytest.mark.slow
def test_a_worker_as_operators_start_it(model_dir: Path, tmp_path: Path) -> None:
    """The other workers are forked from a process that has imported everything; this one is not.

    It has a pool of its own: what the others left behind, queued jobs and weights of a trainer that is gone, is theirs.
    """
    with EmbeddedRedis() as server, ExitStack() as stack:
        worker = WorkerProcess(model_dir, server.url, tmp_path / "operator.log", *OPTIONS, forked=False)
        stack.callback(worker.kill)
        worker.wait_joined()
        client = stack.enter_context(BlockingRolloutClient(server.url))
        assert [result.versions for result in client.wait(client.submit(greedy(4, n=2)), 60)] == [(0,)] * 2
        family = worker.family()
        client.submit(greedy(1900, n=2))
        until_running(client, 2)
        os.killpg(worker.process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        assert worker.process.wait(20) == 0
        assert psutil.wait_procs(family, timeout=5)[1] == []
        assert (client.load().open_jobs, client.load().queued[1]) == (1, 1), "it was handed back"
    told = ["a worker of pool", "importing SGLang", "starting SGLang on cpu", "engine is up: sglang", "joined pool"]
    assert [line for line in told if line not in worker.text()] == []
    assert "Traceback" not in worker.text()
    assert "frozenset" not in worker.text()
