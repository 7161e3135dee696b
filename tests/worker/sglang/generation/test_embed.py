"""Embeddings and rewards by real workers whose SGLang pools; transformers on the same weights is the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from support.pools.served import gateway
from support.pools.worker_process import WorkerProcess

from rolloutmq import BlockingRolloutClient, GenerateJob, JobFailed, WeightPublisher
from rolloutmq.messages.errors import FeatureUnavailable
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.producer import similarity
from rolloutmq.worker.cpu_support import prepare_transformers
from rolloutmq.worker.sglang.weights import checkpoint_names

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
TOLERANCE = 2e-5
"""Of a component of a vector of length 1: both compute in float32, in another order."""
TEXTS = ["How far is it?", "Weit.", "A much longer text, of which there are more tokens than of the others."]
OPTIONS = ("--dtype", "float32", "--max-running", "8", "--drain", "5")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embed") / "model"
    write_tiny_model(path, dtype="float32")
    return path


@pytest.fixture(scope="module")
def reward_dir(model_dir: Path) -> Path:
    """The same model with a head for two labels, whose checkpoint has no bias."""
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification  # noqa: PLC0415

    path = model_dir.parent / "reward"
    torch.manual_seed(3)
    config = Qwen2Config.from_pretrained(model_dir, num_labels=2)
    Qwen2ForSequenceClassification(config).float().save_pretrained(path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def embedder(model_dir: Path, redis_url: str) -> Iterator[WorkerProcess]:
    log = model_dir.parent / "embed.log"
    worker = WorkerProcess(model_dir, redis_url, log, "--task", "embed", "--pool", "embed", *OPTIONS)
    try:
        worker.wait_joined()
        yield worker
    finally:
        worker.kill()


def ids_of(model_dir: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(model_dir)(text)["input_ids"]


def last_hidden(model: Any, ids: list[int]) -> np.ndarray:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0, -1].float().numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_embeddings_are_those_of_transformers_before_and_after_an_update(
    embedder: WorkerProcess, model_dir: Path, redis_url: str
) -> None:
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import Qwen2ForCausalLM  # noqa: PLC0415

    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    expected = [unit(last_hidden(model, ids_of(model_dir, text))) for text in TEXTS]
    with BlockingRolloutClient(redis_url, "embed") as client, WeightPublisher(redis_url, "embed") as publisher:
        found = client.embed(TEXTS, timeout=60)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        by_ids = client.embed([ids_of(model_dir, text) for text in TEXTS], timeout=60)
        np.testing.assert_allclose(by_ids, expected, atol=TOLERANCE)
        np.testing.assert_allclose(similarity(found, found).diagonal(), 1.0, atol=1e-5)
        short = client.embed(TEXTS, dimensions=16, timeout=60)
        np.testing.assert_allclose(short, [unit(vector[:16]) for vector in expected], atol=TOLERANCE)
        chat = [[{"role": "user", "content": "hi"}]]
        rendered = "<|im_start|>user\nhi<|im_end|>\n"
        np.testing.assert_allclose(
            client.embed(chat, timeout=60)[0], unit(last_hidden(model, ids_of(model_dir, rendered))), atol=TOLERANCE
        )

        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
        assert publisher.publish(1, model.state_dict().items()).wait(60).failures == {}
        after = client.embed(TEXTS, min_version=1, timeout=60)  # the same texts: nothing of the old weights is reused
        updated = [unit(last_hidden(model, ids_of(model_dir, text))) for text in TEXTS]
        np.testing.assert_allclose(after, updated, atol=TOLERANCE)
        assert not np.allclose(after, found, atol=0.01)


def test_a_worker_that_embeds_refuses_the_rest_by_name_and_lives(embedder: WorkerProcess, redis_url: str) -> None:
    with BlockingRolloutClient(redis_url, "embed") as client:
        with pytest.raises(JobFailed, match="does not generate"):
            client.wait(client.submit(GenerateJob(token_ids=[1, 2])), 60)
        with pytest.raises(FeatureUnavailable, match="task:reward"):
            client.reward([[1, 2]], timeout=60)
        with pytest.raises(JobFailed, match="dimensions=4000: embeddings of this model have 128"):
            client.embed(["a"], dimensions=4000, timeout=60)
        many = client.embed([[5 + i % 200, 7, i % 300] for i in range(300)], timeout=60)
        assert many.shape == (300, 128)
        (status,) = client.workers()
        assert (status.engine_restarts, status.features) == (0, ("exact_version", "task:embed"))


def test_openais_client_embeds_through_a_gateway(
    embedder: WorkerProcess, model_dir: Path, redis_url: str, tmp_path: Path
) -> None:
    with BlockingRolloutClient(redis_url, "embed") as pool:
        expected, short = (pool.embed(TEXTS, dimensions=size, timeout=60) for size in (None, 16))
    ids = [ids_of(model_dir, text) for text in TEXTS]
    with (
        gateway(redis_url, tmp_path / "gateway.log", "--pool", "embed") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True) as strict,
    ):
        (model,) = client.models.list().data
        said: list[Any] = [TEXTS, ids, TEXTS[0], ids[0]]  # it asks for base64, which its own type does not know
        for asked, vectors in zip(said, [expected, expected, expected[:1], expected[:1]], strict=True):
            answer = client.embeddings.create(model=model.id, input=asked)
            assert [one.index for one in answer.data] == list(range(len(vectors)))
            np.testing.assert_allclose([one.embedding for one in answer.data], vectors, atol=TOLERANCE)
        plain = strict.embeddings.create(model=model.id, input=TEXTS, dimensions=16, encoding_format="float")
        np.testing.assert_allclose([one.embedding for one in plain.data], short, atol=TOLERANCE)
        assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, ids))
        with pytest.raises(BadRequestError, match="dimensions"):
            client.embeddings.create(model=model.id, input=TEXTS, dimensions=4000)
        with pytest.raises(BadRequestError, match="does not generate"):
            client.completions.create(model=model.id, prompt="a")


@pytest.mark.slow
def test_rewards_are_those_of_transformers(
    embedder: WorkerProcess, reward_dir: Path, redis_url: str, tmp_path: Path
) -> None:
    embedder.kill()  # its core is needed
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import Qwen2ForSequenceClassification  # noqa: PLC0415

    assert "score.bias" not in checkpoint_names(str(reward_dir))
    model = Qwen2ForSequenceClassification.from_pretrained(reward_dir, dtype=torch.float32).eval()
    inputs = [ids_of(reward_dir, text) for text in TEXTS]
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].numpy() for ids in inputs]
    worker = WorkerProcess(reward_dir, redis_url, tmp_path / "log", "--task", "reward", "--pool", "reward", *OPTIONS)
    try:
        worker.wait_joined()
        with BlockingRolloutClient(redis_url, "reward") as client:
            for given in (inputs, TEXTS):
                results = client.reward(given, timeout=60)
                np.testing.assert_allclose([result.scores for result in results], expected, atol=TOLERANCE)
                assert [result.score for result in results] == [float(result.scores[0]) for result in results]
                assert [result.tokens for result in results] == [len(ids) for ids in inputs]
    finally:
        worker.kill()


def test_the_head_of_a_checkpoint_is_known_from_its_index_too(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"score.bias": "a.safetensors"}}))
    assert checkpoint_names(str(tmp_path)) == {"score.bias"}
    assert checkpoint_names("no/such-model-anywhere") == frozenset()


def test_the_head_of_a_pickled_checkpoint_is_known_too(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415

    torch.save({"score.bias": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert checkpoint_names(str(tmp_path)) == {"score.bias"}
