"""Stops through whole pools: with and without a tokenizer in the engine, and with new weights in the middle of one."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines.remote import RemoteEngine, RemoteWorker
from support.engines.text_requests import EOS, PROMPT, ids_of, text_of
from support.pools.worker_process import WorkerProcess

from rolloutmq import BlockingRolloutClient, GenerateJob, SamplingParams, WeightPublisher
from rolloutmq.messages.errors import RolloutMQError
from rolloutmq.ops.redis.embedded import EmbeddedRedis

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module", autouse=True)
def worker(text_engine: RemoteEngine, redis_url: str) -> Iterator[RemoteWorker]:
    """The one with a tokenizer; `small_worker` has the same model and none."""
    with text_engine.worker(redis_url) as joined:
        yield joined


def free(**sampling: object) -> GenerateJob:
    fixed = {"temperature": 0.0, "frequency_penalty": 1.5, "max_new_tokens": 120, "logit_bias": {EOS: -1000.0}}
    return GenerateJob(token_ids=PROMPT, sampling=SamplingParams.model_validate(fixed | sampling))


@pytest.mark.slow
def test_with_and_without_the_engines_tokenizer_it_is_the_same(
    redis_url: str, small_pool: str, small_worker: WorkerProcess
) -> None:
    with BlockingRolloutClient(redis_url) as text, BlockingRolloutClient(small_pool) as other:
        (whole,) = text.wait(text.submit(free()), 60)
        tokens = whole.token_ids
        said_at = {i: text_of(tokens[i : i + 3]) for i in range(90)}
        places = [i for i, said in said_at.items() if len(said) == 3 and said.isascii() and said.isprintable()]
        assert places
        for i in places[:6]:
            said = text_of(tokens[i : i + 3])
            for include in (True, False):
                (one,) = text.wait(text.submit(free(stop=(said,), include_stop=include)), 60)
                (two,) = other.wait(other.submit(free(stop_token_sequences=(ids_of(said),), include_stop=include)), 60)
                assert one.token_ids.tolist() == two.token_ids.tolist()
                first = next(k for k in range(i + 1) if tokens[k : k + 3].tolist() == list(ids_of(said)))
                assert one.token_ids.tolist() == tokens[: first + 3 * include].tolist()
                assert (one.matched_stop, two.matched_stop) == (said, ids_of(said))
                assert one.logprobs.tolist() == pytest.approx(two.logprobs.tolist(), abs=1e-4)


def test_without_a_tokenizer_texts_and_grammars_are_refused_by_name(
    small_pool: str, small_worker: WorkerProcess
) -> None:
    with BlockingRolloutClient(small_pool) as client:
        for name, value in (("stop", ("a",)), ("stop_regex", ("a",)), ("regex", "a")):
            with pytest.raises(RolloutMQError, match=f"sampling.{name}"):
                client.wait(client.submit(free(**{name: value})), 60)
        (result,) = client.wait(client.submit(free(min_new_tokens=5, max_new_tokens=6, logit_bias={EOS: 99.0})), 60)
        assert (len(result.token_ids), result.matched_stop) == (6, EOS)


def test_the_examples_of_the_documentation_run_as_written(redis_url: str) -> None:
    page = Path(__file__).parents[4] / "docs" / "generation.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    environment = os.environ | {"ROLLOUTMQ_REDIS": redis_url}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_weights_change_in_the_middle_of_a_stop(redis_url: str, text_model: Path) -> None:
    """All that is said is the stop, but for three characters, which are said when the update comes."""
    from safetensors.torch import load_file  # noqa: PLC0415

    weights = load_file(text_model / "model.safetensors")
    stop = "€" + "ab" * 510 + "END"
    sampling = {"temperature": 0.0, "max_new_tokens": 1200, "regex": "PRE€(ab){510}END[a-z]{100}"}
    kinds: list[dict[str, object]] = [{"stop": (stop,)}, {"stop_regex": ("€.*D",), "include_stop": False}]
    jobs = [GenerateJob(text="say", n=3, sampling=SamplingParams.model_validate(sampling | kind)) for kind in kinds]
    with BlockingRolloutClient(redis_url) as client, WeightPublisher(redis_url) as publisher:
        handles = client.submit_many(jobs)
        behind = jobs[0].model_copy(update={"id": uuid.uuid4().hex, "n": 1, "stream": True})
        with contextlib.closing(client.stream(behind, timeout=60)) as deltas:
            said = 0
            while said < 12:  # the others began before it: all seven run at once
                said += len(next(deltas).token_ids)
        assert publisher.publish(1, {name: 0.9 * t for name, t in weights.items()}).wait(60).state == "committed"
        kept, trimmed = (client.wait(handle, 120) for handle in handles)
    for result in kept:
        assert (result.text, result.matched_stop, result.versions) == ("PRE" + stop, stop, (0, 1))
        assert len(result.token_ids) == len(("PRE" + stop).encode())
    for result in trimmed:
        assert (result.text, result.matched_stop, result.versions) == ("PRE", "€.*D", (0,))
        assert result.token_ids.tolist() == list(ids_of("PRE"))
        assert result.logprobs is not None
        assert len(result.logprobs) == 3
