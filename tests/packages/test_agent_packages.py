"""What agents are run with, over a gateway: verifiers, rLLM's gateway, agent-lightning, ART, and NeMo-Gym.

Each package sends what it sends and reads what it reads, as its users start it. The judge of the ids, versions and
log-probabilities that it has read is transformers. The pool's weights are not those on disk.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from support.engines.asking import judged
from support.engines.remote import RemoteEngine
from support.pools.pool import eventually
from support.pools.served import Served, gateway, port, served
from support.trainers.by_heart import learn

from rolloutmq import BlockingRolloutClient, WeightPublisher
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import load_tiny_model

if importlib.util.find_spec("agentlightning") is None:
    pytest.skip("the agents' packages are not installed: make test-trainers", allow_module_level=True)

TESTS = Path(__file__).parents[1]
TOLERANCE = 1e-3
"""Of a log-probability, both sides in float32."""
NAME, VERSION = "tiny", 7
"""The model's name, and the first version's number."""
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How far is it?"}]
SAID = {"max_tokens": 24, "temperature": 1.0}
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@dataclass
class Pool:
    """A pool with one worker and a gateway, and the same model in this process."""

    redis: str
    gateway: Served
    name: str
    path: str
    model: Any
    tokenizer: Any
    publisher: WeightPublisher
    version: int = 0

    @property
    def url(self) -> str:
        return f"{self.gateway.url}/v1"

    def rendered(self, talk: Any) -> list[int]:
        """What the model is shown of a talk."""
        ids: list[int] = self.tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        return ids

    def publish(self) -> None:
        """The model's weights, as the next version."""
        self.version = self.publisher.last_version + VERSION
        assert self.publisher.publish(self.version, self.model.state_dict().items()).wait(60).failures == {}

    def check(self, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], talk: Any = TALK) -> None:
        """The prompt is the talk, and the log-probabilities are the model's own."""
        assert list(prompt) == self.rendered(talk)
        assert 0 < len(ids) <= SAID["max_tokens"]
        own = judged(self.model, [*prompt, *ids])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logprobs, own[np.arange(len(ids)), ids], atol=TOLERANCE)


@pytest.fixture(scope="module")
def pool(text_model: Path, text_engine: RemoteEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    model, tokenizer = load_tiny_model(text_model).eval(), AutoTokenizer.from_pretrained(text_model)
    torch.manual_seed(VERSION)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
    log = tmp_path_factory.mktemp("agents") / "gateway.log"
    with (
        EmbeddedRedis() as server,
        text_engine.worker(server.url),
        WeightPublisher(server.url) as publisher,
        gateway(server.url, log, "--served-model-name", NAME) as started,
    ):
        made = Pool(server.url, started, NAME, str(text_model), model, tokenizer, publisher)
        made.publish()
        yield made


def environment(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """Of processes that this test starts."""
    path = [str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for name, value in {"PYTHONPATH": os.pathsep.join(path), **more}.items():
        monkeypatch.setenv(name, value)


def said(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def read(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


# --- verifiers -------------------------------------------------------------------------------------------------------


async def test_verifiers_eval_client(pool: Pool) -> None:
    from verifiers.v1.clients import EvalClient, EvalClientConfig  # noqa: PLC0415
    from verifiers.v1.dialects.chat import ChatDialect  # noqa: PLC0415
    from verifiers.v1.errors import ProviderError  # noqa: PLC0415
    from verifiers.v1.types import SamplingConfig  # noqa: PLC0415

    dialect, sampling = ChatDialect(), SamplingConfig(**SAID)
    client = EvalClient(EvalClientConfig(base_url=pool.url, api_key_var="NONE"))
    native = {"messages": TALK, "logprobs": True, "return_token_ids": True}
    body = dialect.apply_overrides(native, pool.name, sampling)
    answer = await client.get_response(dialect, body, sampling, session_id="trace-1")
    raw = answer.raw
    (choice,) = raw["choices"]
    pool.check(raw["prompt_token_ids"], choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]])
    assert (answer.message.content or "") == (choice["message"]["content"] or "")
    assert answer.usage.completion_tokens == len(choice["token_ids"])
    assert int(raw["weight_version"]) == pool.version

    streams = {"stream": True, "stream_options": {"include_usage": True}}
    relayed = await client.relay(dialect, body | streams, session_id="trace-1")
    parser = dialect.stream_parser()
    async for event in relayed.chunks:
        parser.feed(event)
    await relayed.close()
    streamed = parser.finish()
    with BlockingRolloutClient(pool.redis) as trainer:
        first, second = trainer.take_session("trace-1").turns
    assert first.token_ids.tolist() == choice["token_ids"]
    assert streamed.usage.completion_tokens == len(second.token_ids)
    with pytest.raises(ProviderError, match="messages") as refused:
        await client.get_response(dialect, body | {"messages": []}, sampling)
    assert refused.value.status_code == 400
    await client.close()


# --- rLLM's gateway --------------------------------------------------------------------------------------------------


async def test_rllm_gateway_traces_what_its_agent_did(pool: Pool, tmp_path: Path) -> None:
    from rllm_model_gateway import GatewayClient  # noqa: PLC0415

    at = port()
    command = [sys.executable, "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(at)]
    command += ["--worker", pool.url, "--store", "memory"]
    with served(command, at, tmp_path / "rllm.log") as theirs, GatewayClient(theirs.url) as traces:
        session = traces.create_session("episode-1")
        async with AsyncOpenAI(base_url=traces.get_session_url(session), api_key="none") as agent:
            whole = await agent.chat.completions.create(model=pool.name, messages=TALK, **SAID)
            streamed = await read(
                await agent.chat.completions.create(model=pool.name, messages=TALK, stream=True, **SAID)
            )
        assert whole.choices[0].logprobs is None, "the agent did not ask for them"
        await eventually(lambda: len(traces.get_session_traces(session)) == 2)  # stored after the answer
        found = traces.get_session_traces(session)
    for trace in found:
        pool.check(trace.prompt_token_ids, trace.completion_token_ids, trace.logprobs)
        assert (trace.response_message.get("content") or "") == pool.tokenizer.decode(
            trace.completion_token_ids, skip_special_tokens=True
        )
    plain, parts = sorted(found, key=lambda trace: trace.raw_response is None)
    assert int(plain.raw_response["weight_version"]) == pool.version
    assert plain.token_counts == {"prompt": len(plain.prompt_token_ids), "completion": len(plain.completion_token_ids)}
    assert (whole.choices[0].message.content or "", streamed) == (
        plain.response_message.get("content") or "",
        parts.response_message.get("content", ""),
    )


# --- agent-lightning -------------------------------------------------------------------------------------------------


def test_agent_lightning_rollouts_have_triplets(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server, its controller, which starts each agent in a process, and the manager of its trainer."""
    from agentlightning.verl.agl_rollout_manager import AglRolloutManager  # noqa: PLC0415

    environment(monkeypatch, HYDRA_FULL_ERROR="1")
    at = port()
    run = [f"hydra.run.dir={tmp_path}", "hydra/job_logging=disabled"]
    server = [sys.executable, "-m", "agentlightning.server", *run, "host=127.0.0.1", f"port={at}"]
    with served([*server, f"default_proxy.model_name={pool.name}"], at, tmp_path / "agl.log", "/healthz") as theirs:
        manager = AglRolloutManager(
            agl_base_url=theirs.url,
            agl_key="",
            model=pool.name,
            step=1,
            train_rollout_n=2,
            poll_interval_seconds=0.1,
            local_agent_class="support.trainers.agl_agent:Agent",
            local_env_map={"TALK": "input.talk"},
        )
        manager.register_model([pool.url])
        control = [f"agl_server.url={theirs.url}", "runner_type=local", "local_runner.poll_interval=0.1"]
        controller = [sys.executable, "-m", "agentlightning.controller", *run, *control]
        with served(controller, at, tmp_path / "controller.log", "/healthz") as runner:
            done = manager.enqueue_and_wait_until_completed({"talk": [TALK]}, is_train=True)
            told = runner.text()
    assert [one.rollout_state for one in done] == ["succeeded"] * 2, told[-4000:]
    for one in done:
        (first, second) = one.triplets
        for triplet in one.triplets:
            assert triplet.metadata["server"]["model"] == pool.name
        pool.check(first.prompt["token_ids"], first.response["token_ids"], first.response["log_probs"])
        (choice,) = one.events[0]["data"]["response"]["choices"]
        talk = [*TALK, said(choice["message"]["content"]), {"role": "user", "content": "And back?"}]
        pool.check(second.prompt["token_ids"], second.response["token_ids"], second.response["log_probs"], talk)
        assert one.final_reward == 0.5


# --- ART -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def marked(pool: Pool, tmp_path: Path) -> str:
    """The tokenizer, with "~~" as its last token.

    ART writes its last token that occurs nowhere in the place of what was sampled. Else that would be half a character.
    """
    folder = tmp_path / "tokenizer"
    pool.tokenizer.save_pretrained(folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    told["model"]["vocab"]["~~"] = len(told["model"]["vocab"])
    told["model"]["merges"].append(["~", "~"])
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return str(folder)


@pytest.mark.parametrize("stream", [False, True])
def test_art_has_the_tokens_of_what_its_agent_did(
    pool: Pool, marked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its agents ask for no log-probabilities: ART's servers give them unasked, and so does a gateway told to.

    The model has learnt its answers: ART renders the talk's texts, and what a random model says is no text.
    """
    told = [*TALK, said("Twelve miles."), {"role": "user", "content": "And back?"}, said("The same.")]
    parts: list[tuple[list[int], bool]] = []
    for answer in (2, 4):
        shown, before = pool.rendered(told[:answer]), sum(len(ids) for ids, _ in parts)
        parts += [(shown[before:], False), (pool.tokenizer.encode(told[answer]["content"] + "<|im_end|>"), True)]
    learn(pool.model, [parts])
    pool.publish()
    environment(monkeypatch, LITELLM_LOCAL_MODEL_COST_MAP="True")
    defaults = {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    options = ("--served-model-name", NAME, "--defaults", json.dumps(defaults))
    with gateway(pool.redis, tmp_path / "art.log", *options) as giving:
        settings = [json.dumps(it) for it in (TALK, SAID | {"stream": stream})]
        command = [sys.executable, "-m", "support.trainers.art_agent", f"{giving.url}/v1", NAME, marked, *settings]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    ids, mask = np.array(found["token_ids"]), np.array(found["mask"], bool)
    begins = np.flatnonzero(np.diff(mask, prepend=False) & mask)
    assert found["talk"][:5] == told
    assert [ids[:begin].tolist() for begin in begins] == [pool.rendered(told[:answer]) for answer in (2, 4)]
    own = judged(pool.model, ids.tolist())[np.flatnonzero(mask) - 1, ids[mask]]
    np.testing.assert_allclose(np.array(found["logprobs"])[mask], own, atol=TOLERANCE)


# --- NeMo-Gym --------------------------------------------------------------------------------------------------------

WAYS = {
    "inline": {"request_prompt_and_generation_token_ids": True},
    "tokenize": {},  # it asks /tokenize for the prompt's
    "completions": {"use_completions_api": True, "render_chat_template": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_nemo_gym_model_server(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A process of its `vllm_model`, as Gym starts it."""
    at = port()
    settings = {"host": "127.0.0.1", "port": at, "entrypoint": "app.py", "base_url": pool.url, "api_key": "none"}
    settings |= {"model": pool.name, "return_token_id_information": True, "uses_reasoning_parser": False}
    model = {"responses_api_models": {"vllm_model": settings | {"tokenizer": pool.path} | WAYS[way]}}
    config = {"head_server": {"host": "127.0.0.1", "port": 1}, "dry_run": False, "policy": model}
    environment(monkeypatch, NEMO_GYM_CONFIG_DICT=json.dumps(config), NEMO_GYM_CONFIG_PATH="policy")
    # Gym puts its own folder last on the path, where SGLang's openai would be found first.
    module = "responses_api_models.vllm_model.app"
    start = f"import openai, runpy; runpy.run_module({module!r}, run_name='__main__')"
    with served([sys.executable, "-c", start], at, tmp_path / "gym.log") as server, httpx.Client() as client:

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = client.post(server.url + path, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        chat = ask("/v1/chat/completions", {"messages": TALK, **SAID})["choices"][0]["message"]
        asked = {"input": TALK, "max_output_tokens": SAID["max_tokens"], "temperature": 1.0}
        native = ask("/v1/responses", asked)["output"][-1]
        for it in (chat, native):
            pool.check(it["prompt_token_ids"], it["generation_token_ids"], it["generation_log_probs"])
        long = {"messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 8}
        (choice,) = ask("/v1/chat/completions", long)["choices"]
        assert choice["finish_reason"] == "length", "a prompt that does not fit is no error there"
