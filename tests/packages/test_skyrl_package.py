"""SkyRL's own generator (skyrl 0.3.0) and inference client (skyrl-train 0.3.1) over a pool.

The judge is transformers: with the generator as an engine in this process, with the client for every token.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typing_extensions
from support.engines.remote import RemoteEngine
from support.pools.pool import eventually

from rolloutmq import RolloutClient
from rolloutmq.ops.config import load_settings
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.producer.skyrl import SkyRLEngine

if importlib.util.find_spec("skyrl") is None:
    pytest.skip("SkyRL is not installed: make test-trainers", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-3
"""Of a log-probability, both sides in float32."""
PROMPTS, LONG = [[5 + place, 6, 7] for place in range(6)], 1000
MANY = 20
"""So many tokens tell two versions apart by their log-probabilities."""
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def example(text_model: Path, text_engine: RemoteEngine) -> Iterator[ModuleType]:
    """examples/skyrl_generator.py, beside a pool with one worker."""
    load_tiny_model(text_model)  # before SkyRL: it makes transformers fit this machine's torch
    with pytest.MonkeyPatch.context() as patch, EmbeddedRedis() as server, text_engine.worker(server.url):
        # SkyRL is written for Python 3.12. Pydantic takes its typed dictionaries on 3.11 if they are of this kind.
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        patch.setenv("ROLLOUTMQ_REDIS", server.url)
        patch.setenv("MODEL", str(text_model))
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("skyrl_generator")


class Plain:
    """An engine in this process, on transformers: greedy."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self._model, self._tokenizer, self.model_name = load_tiny_model(path).eval(), tokenizer, str(path)

    async def generate(self, batch: Any, model: str | None = None) -> Any:
        out: dict[str, list[Any]] = {"responses": [], "response_ids": [], "stop_reasons": [], "response_logprobs": []}
        for prompt in batch["prompt_token_ids"]:
            ids, logprobs = self._answer(prompt, batch["sampling_params"])
            out["responses"].append(self._tokenizer.decode(ids, skip_special_tokens=True))
            out["response_ids"].append(ids)
            out["stop_reasons"].append("stop" if ids[-1] == self._tokenizer.eos_token_id else "length")
            out["response_logprobs"].append(logprobs)
        return out

    def _answer(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], list[float]]:
        import torch  # noqa: PLC0415

        ids, logprobs = list(prompt), []
        with torch.inference_mode():
            while len(logprobs) < params["max_generate_length"] and ids[-1:] != [self._tokenizer.eos_token_id]:
                row = torch.log_softmax(self._model(torch.tensor([ids])).logits[0, -1], -1)
                ids.append(int(row.argmax()))
                logprobs.append(float(row[ids[-1]]))
        return ids[len(prompt) :], logprobs

    async def finish_session(self, session_id: Any) -> None:
        """Nothing is open."""


def same(ours: Any, theirs: Any, place: str = "") -> None:
    """Field by field; numbers within the tolerance."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for name in ours:
            same(ours[name], theirs[name], f"{place}.{name}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), place
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{place}.{number}")
    elif isinstance(ours, float):
        assert math.isclose(ours, theirs, abs_tol=TOLERANCE), (place, ours, theirs)
    else:
        assert ours == theirs, (place, ours, theirs)


@pytest.mark.parametrize("settings", [{}, {"use_conversation_multi_turn": False}, {"step_wise_trajectories": True}])
async def test_the_generator_gives_what_it_gives_over_an_engine_in_one_process(
    example: ModuleType, text_model: Path, settings: dict[str, Any]
) -> None:
    tokenizer = example.AutoTokenizer.from_pretrained(text_model)
    engine, outputs = SkyRLEngine(tokenizer=tokenizer, pause_mode="in_place"), []
    for each in (engine, Plain(text_model, tokenizer)):
        generator = example.generator(each, tokenizer, **settings)
        output = await generator.generate(example.trajectories(4))
        output["rollout_metrics"] = {k: v for k, v in (output["rollout_metrics"] or {}).items() if "time" not in k}
        outputs.append({name: value for name, value in output.items() if "time" not in name})
    await engine.teardown()
    same(*outputs)
    assert len(outputs[0]["response_ids"]) == (12 if "step_wise_trajectories" in settings else 4)


async def test_skyrls_own_configuration_is_a_clients_too(example: ModuleType, text_model: Path, tmp_path: Path) -> None:
    from omegaconf import OmegaConf  # noqa: PLC0415
    from skyrl.train.config.config import SkyRLTrainConfig  # noqa: PLC0415

    config = OmegaConf.structured(SkyRLTrainConfig)
    config.trainer.policy.model.path = str(text_model)
    config.generator.max_turns, config.generator.n_samples_per_prompt = 3, 2
    config.generator.sampling_params.max_generate_length = MANY
    (tmp_path / "skyrl.yaml").write_text(OmegaConf.to_yaml(config))
    settings = load_settings(tmp_path / "skyrl.yaml")
    assert (settings.engine().model, settings.episode_limits().turns) == (str(text_model), 3)
    async with RolloutClient() as client:
        groups = await client.generate(PROMPTS, **settings.job())
    lengths = [len(result.token_ids) for group in groups for result in group.results]
    assert (len(lengths), min(lengths) > 0, max(lengths) <= MANY) == (2 * len(PROMPTS), True, True)


class Watched(SkyRLEngine):
    """Keeps what each `generate` was given and what it returned: the client shows no versions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.legs: list[tuple[list[int], Any]] = []
        self.begun = 0

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        self.begun += 1
        output = await super().generate(input_batch, model)
        self.legs += [(prompt, output) for prompt in input_batch["prompt_token_ids"]]
        return output


async def test_the_client_through_updates_under_load(
    example: ModuleType, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request has all of its tokens, and each of them is of the version that is said to have sampled it."""
    from omegaconf import OmegaConf  # noqa: PLC0415
    from skyrl_train.inference_engines import inference_engine_client  # noqa: PLC0415
    from skyrl_train.inference_engines.base import InferenceEngineInterface  # noqa: PLC0415

    # How long it lets requests arrive before it aborts them; the test sees itself that they have.
    monkeypatch.setattr(inference_engine_client, "ABORT_GENERATION_GRACE_PERIOD_SECONDS", 0.01)
    http = {"enable_http_endpoint": False, "http_endpoint_host": "", "http_endpoint_port": 0}
    path, tokenizer = str(text_model), example.AutoTokenizer.from_pretrained(text_model)
    engine = Watched(tokenizer=tokenizer)
    assert isinstance(engine, InferenceEngineInterface)
    client = inference_engine_client.InferenceEngineClient(
        [engine],
        tokenizer,
        OmegaConf.create({"trainer": {"policy": {"model": {"path": path}}}, "generator": {"backend": "sglang"} | http}),
    )
    params = {"max_tokens": LONG, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    requests = [
        asyncio.create_task(client.generate({"prompt_token_ids": [prompt], "sampling_params": params}))
        for prompt in PROMPTS
    ]
    talk = {"messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 300, "ignore_eos": True, "model": path}
    chat = asyncio.create_task(client.chat_completion({"json": talk}))
    versions = {"0": load_tiny_model(text_model).eval()}
    for step in (1, 2):
        name = f"step_{step}"
        versions[name] = changed(load_tiny_model(text_model), step).eval()
        # When a request behind them has its tokens, they have tokens of this version, too.
        await eventually(lambda: engine.begun == step * len(PROMPTS))  # noqa: B023 – awaited here
        await engine.generate({"prompt_token_ids": [[4]], "sampling_params": params | {"max_tokens": MANY}})
        engine.begun -= 1
        await client.pause_generation()
        weights = versions[name].state_dict()
        await client.update_named_weights({"names": list(weights), "tensors": list(weights.values())})
        await engine.update_weight_version(name)
        await client.resume_generation()
    outputs, answer = await asyncio.gather(*requests), await chat
    await engine.teardown()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 300)
    sampled: set[str] = set()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output["stop_reasons"] == ["length"]
        legs = [leg for leg in engine.legs if leg[0][: len(prompt)] == prompt]
        assert [token for _, leg in legs for token in leg["response_ids"][0]] == output["response_ids"][0]
        assert len(output["response_ids"][0]) == len(output["response_logprobs"][0]) == LONG
        sampled |= {version for leg in legs for version in judge(*leg, versions)}
    assert sampled == set(versions)


def changed(model: Any, seed: int) -> Any:
    """The model after a step that stands for training."""
    import torch  # noqa: PLC0415

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    return model


def judge(prompt: list[int], leg: Any, versions: dict[str, Any]) -> set[str]:
    """Check each token's log-probability under its version, and that it is not that of another one. The versions."""
    import torch  # noqa: PLC0415

    ids, told = leg["response_ids"][0], leg["response_logprobs"][0]
    found = set()
    for span in leg["weight_versions"][0]:
        place = slice(span["start"], span["end"])
        gaps = {}
        for name, model in versions.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            own = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[place, 0]
            gaps[name] = (own - torch.tensor(told[place])).abs()
        assert gaps[span["version"]].max() < TOLERANCE
        found.add(span["version"])
        if len(gaps[span["version"]]) >= MANY:
            assert all(gap.mean() > 10 * TOLERANCE for name, gap in gaps.items() if name != span["version"])
    return found
