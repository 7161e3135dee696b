"""A SkyRL-like loop over a worker with real SGLang: generate, train, broadcast, generate; transformers is the judge."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.asking import judged, judged_states
from support.engines.remote import RemoteEngine, RemoteWorker
from support.pools import skyrl_trainer

from rolloutmq.messages import InvalidField, SamplingParams
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.skyrl import InferenceEngineOutput, SkyRLEngine, group_outputs_by_prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
PROMPTS = [list(range(5, 30)), list(range(40, 52)), [7, 8, 9]]
GREEDY: Any = {"max_generate_length": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
TOLERANCE = 1e-3
"""Of a log-probability, both sides in float32."""


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def worker(text_engine: RemoteEngine, redis_url: str) -> Iterator[RemoteWorker]:
    with text_engine.worker(redis_url) as joined:
        yield joined


@pytest.fixture(scope="module")
def versions(text_model: Path, worker: RemoteWorker) -> list[Any]:
    """transformers models in float32: as on disk, and after one and two steps of a stand-in for training."""
    import torch  # noqa: PLC0415
    from transformers import Qwen2ForCausalLM  # noqa: PLC0415

    made = []
    for step in range(4):
        model = Qwen2ForCausalLM.from_pretrained(text_model, dtype=torch.float32)
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                if step:
                    parameter.add_(0.3 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
        made.append(model.eval())
    return made


@pytest.fixture
async def it(worker: RemoteWorker, redis_url: str, text_model: Path) -> AsyncIterator[SkyRLEngine]:
    made = SkyRLEngine(redis_url, tokenizer=str(text_model), sampling_params=GREEDY, timeout_s=60.0)
    yield made
    await made.teardown()


def judge(output: InferenceEngineOutput, prompts: list[list[int]], versions: list[Any]) -> None:
    """Every token is the likeliest one, with its log-probability, under the version that is said to have sampled it."""
    import torch  # noqa: PLC0415

    assert output["response_logprobs"] is not None
    columns = output["response_ids"], output["response_logprobs"], output["weight_versions"]
    for prompt, ids, logprobs, spans in zip(prompts, *columns, strict=True):
        assert ids
        for span in spans:
            with torch.no_grad():
                logits = versions[int(span["version"])](torch.tensor([[*prompt, *ids]])).logits[0]
            expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].numpy()[span["start"] : span["end"]]
            tokens = np.array(ids[span["start"] : span["end"]])
            chosen = expected[np.arange(len(tokens)), tokens]
            np.testing.assert_allclose(logprobs[span["start"] : span["end"]], chosen, atol=TOLERANCE)
            np.testing.assert_allclose(chosen, expected.max(-1), atol=2 * TOLERANCE)


def test_a_training_loop(
    worker: RemoteWorker, redis_url: str, text_model: Path, versions: list[Any], tmp_path: Path
) -> None:
    """Rank 0 of the trainer is a process of its own, and broadcasts as SkyRL's sender does."""
    from safetensors.torch import save_file  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(skyrl_trainer.__file__))]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert trainer.stdin is not None
    assert trainer.stdout is not None

    async def loop() -> None:
        it = SkyRLEngine(redis_url, tokenizer=str(text_model), sampling_params=GREEDY, timeout_s=60.0)
        first = await it.generate({"prompt_token_ids": PROMPTS})
        assert first["weight_version"] == "0"
        judge(first, PROMPTS, versions)
        trainer.stdin.write(f"join {port} 2 skyrl\n")  # type: ignore[union-attr]
        await it.init_weight_update_communicator("127.0.0.1", port, 1, 2, "skyrl", "gloo")
        for step in (1, 2):
            await it.pause_generation()
            tensors = {name: one.detach().contiguous() for name, one in versions[step].named_parameters()}
            save_file(tensors, tmp_path / f"{step}.safetensors")
            trainer.stdin.write(f"file skyrl {tmp_path / f'{step}.safetensors'}\n")  # type: ignore[union-attr]
            for name in sorted(tensors):
                await it.update_named_weights(
                    {"names": [name], "dtypes": ["float32"], "shapes": [list(tensors[name].shape)]}
                )
            await it.continue_generation()
            output = await it.generate({"prompt_token_ids": PROMPTS})
            assert output["weight_version"] == await it.get_weight_version() == str(step)
            judge(output, PROMPTS, versions)
            assert output["response_ids"] != first["response_ids"]
        whole = await it.check_weight_sync_integrity("2")
        assert whole["consistent"], whole
        await it.teardown()

    try:
        asyncio.run(loop())
        heard = [trainer.stdout.readline().strip() for _ in range(3)]
        assert heard == ["joined", "sent", "sent"]
    finally:
        trainer.kill()
        trainer.communicate()


async def test_groups_sessions_and_streams(it: SkyRLEngine, versions: list[Any]) -> None:
    output = await it.generate({"prompt_token_ids": PROMPTS, "sampling_params": GREEDY | {"n": 2}})
    groups = group_outputs_by_prompt(output)
    assert len(groups) == len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        judge(group, [prompt] * 2, versions)
    assert output["responses"] == await it.decode(output["response_ids"])

    session = await it.open_session()
    assert session is not None
    ids, said = [7, 8, 9], [7, 8, 9]
    rid = None
    for _ in range(3):
        turn = await it.generate_with_session(session, {"prompt_token_ids": [ids]}, rid=rid)
        judge(turn, [said], versions)
        said = [*said, *turn["response_ids"][0], 11, 12]
        ids, rid = [11, 12], (turn["request_ids"] or [None])[0]

    chunks = [chunk async for chunk in it.generate_stream({"prompt_token_ids": PROMPTS})]
    for index, group in enumerate(groups):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert [chunk["delta_token_id"] for chunk in mine if chunk["delta_token_id"] is not None] == group[
            "response_ids"
        ][0]
        assert "".join(chunk["delta_text"] for chunk in mine) == group["responses"][0]


async def test_stops_are_trimmed_from_responses_and_kept_where_the_parameters_say_so(it: SkyRLEngine) -> None:
    """What is said is given, and of one byte a token: a stop text is several tokens."""
    said: Any = GREEDY | {"regex": "abcENDxyz", "ignore_eos": False}

    async def answer(**params: Any) -> tuple[str, list[int], list[float]]:
        output = await it.generate({"prompt_token_ids": PROMPTS[:1], "sampling_params": said | params})
        assert output["response_logprobs"] is not None
        assert output["stop_reasons"] == ["stop"]
        assert len(output["response_ids"][0]) == len(output["response_logprobs"][0])
        return output["responses"][0], output["response_ids"][0], output["response_logprobs"][0]

    text, ids, logprobs = await answer(stop=["END"], include_stop_str_in_output=True)
    assert (text, len(ids)) == ("abcEND", 6)
    trimmed: list[Any] = [{"stop": ["END"]}, {"stop_regex": ["E[A-Z]+D"]}, {"stop": ["END"], "no_stop_trim": False}]
    for params in trimmed:
        found = await answer(**params)
        assert found[:2] == ("abc", ids[:3])
        np.testing.assert_allclose(found[2], logprobs[:3], atol=TOLERANCE)
    assert await answer(stop=["END"], no_stop_trim=True) == (text, ids, pytest.approx(logprobs, abs=TOLERANCE))
    assert (await answer(stop=["END"], stop_token_ids=[ids[4]]))[:2] == ("abcEN", ids[:5]), "a token that stops stays"
    batch: Any = {"prompt_token_ids": PROMPTS[:1], "sampling_params": said | {"stop": ["END"]}}
    chunks = [chunk async for chunk in it.generate_stream(batch)]
    assert "".join(chunk["delta_text"] for chunk in chunks) == "abc"


async def test_scores_with_hidden_states(it: SkyRLEngine, versions: list[Any]) -> None:
    """Of answers that the model would never have given by itself, in one batch."""
    answers = [[9, 200, 3, 44], [17] * 9, [250]]
    found = await it.score(PROMPTS, answers, return_hidden_states=True)
    model = versions[int(await it.get_weight_version() or 0)]
    for prompt, answer, score, states in zip(PROMPTS, answers, found["scores"], found["hidden_states"], strict=True):
        expected = judged_states(model, [*prompt, *answer])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(states, expected, atol=5e-3)
        rows = judged(model, [*prompt, *answer])[len(prompt) - 1 : -1]
        assert score == pytest.approx(float(sum(row[token] for row, token in zip(rows, answer, strict=True))), abs=0.01)
    generated = await it.generate({"prompt_token_ids": PROMPTS, "return_hidden_states": True})
    again = await it.score(PROMPTS, generated["response_ids"], return_hidden_states=True)
    for one, other in zip(generated["hidden_states"] or (), again["hidden_states"], strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, atol=5e-3)


async def test_parameters_by_name(it: SkyRLEngine, versions: list[Any]) -> None:
    """By the engine's names, where q, k and v are one tensor, and by those of the checkpoint."""
    parameters = dict(versions[int(await it.get_weight_version() or 0)].named_parameters())
    first = "model.layers.0.self_attn"
    for name in ("model.embed_tokens.weight", "model.norm.weight", f"{first}.q_proj.weight", f"{first}.k_proj.bias"):
        np.testing.assert_array_equal(await it.get_weights_by_name(name), parameters[name][:100].detach().numpy())
    queries = parameters[f"{first}.q_proj.weight"].detach().numpy()
    assert await it.get_weights_by_name(f"{first}.qkv_proj.weight", truncate_size=2) == queries[:2].tolist()
    with pytest.raises(InvalidField, match="qkv_proj"):
        await it.get_weights_by_name(f"{first}.qkv_pro.weight")
    (answer,) = (await (await it.client()).control.parameter("model.norm.weight", rank=1)).values()
    assert (answer.kind, "rank=1" in answer.error) == ("InvalidField", True)
    some = await it.validate_weights(names=["model.norm.weight"])
    (one,) = some["workers"].values()
    assert (some["valid"], one["parameters"]) == (True, 1)
    with pytest.raises(InvalidField, match="nearest: model"):
        await it.validate_weights(names=["model.norm.weigh"])


async def test_openai_bodies(it: SkyRLEngine) -> None:
    messages = [{"role": "user", "content": "hé"}]
    body = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    answer = await it.chat_completion({"json": body | {"logprobs": True, "top_logprobs": 3}})
    (choice,) = answer["choices"]
    prompts = [[{"role": "user", "content": "hé"}]]
    same = await it.generate({"prompts": prompts, "sampling_params": {"max_tokens": 12, "temperature": 0.0}})
    assert choice["token_ids"] == same["response_ids"][0]
    assert choice["message"]["content"] == same["responses"][0]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"], abs=1e-4)  # it is greedy
    text = await it.completion({"json": {"prompt": answer["prompt_token_ids"], "max_tokens": 12, "temperature": 0}})
    assert text["choices"][0]["text"] == same["responses"][0]
    said = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]\}\}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    called = await it.chat_completion({"json": body | {"tools": [tool], "regex": said, "max_tokens": 100}})
    (choice,) = called["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    wrong = await it.chat_completion({"json": body | {"max_tokens": SamplingParams().max_new_tokens * 10_000}})
    assert wrong["error"]["code"] == 400


async def test_weights_are_validated_after_an_update(it: SkyRLEngine, versions: list[Any]) -> None:
    """The audit's third path: update, validate, check the version, generate."""
    weights = versions[3].state_dict()
    await it.update_named_weights({"names": list(weights), "tensors": list(weights.values())})
    await it.update_weight_version("step_100")
    valid = await it.validate_weights()
    assert (valid["valid"], valid["version"]) == (True, "step_100"), valid
    whole = await it.check_weight_sync_integrity(expected_version="step_100")
    assert whole["consistent"], whole
    name = "model.layers.1.mlp.gate_proj.weight"
    np.testing.assert_array_equal(await it.get_weights_by_name(name), weights[name][:100].numpy())
    output = await it.generate({"prompt_token_ids": PROMPTS})
    assert output["weight_version"] == "step_100"
    for spans in output["weight_versions"]:
        for span in spans:
            span["version"] = "3"
    judge(output, PROMPTS, versions)


async def test_the_engines_duties(it: SkyRLEngine) -> None:
    await it.reset_prefix_cache()
    valid = await it.validate_weights()
    assert valid["valid"], valid
    output = await it.generate({"prompt_token_ids": PROMPTS})
    found = await it.score(PROMPTS, output["response_ids"])
    assert output["response_logprobs"] is not None
    np.testing.assert_allclose(found["scores"], [sum(one) for one in output["response_logprobs"]], atol=0.01)
    assert (it.tp_size(), it.pp_size(), it.dp_size()) == (1, 1, 1)
    assert it.get_memory_pool_size() == 32768
