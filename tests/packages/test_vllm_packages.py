"""Trainers' own clients over the gateway's door of vLLM: verifiers, TRL, SkyRL and prime-rl, unmodified.

Each sends what it sends and reads what it reads. The judge of log-probabilities is transformers. prime-rl is on no
package index: it is tested where its sources are on the path (see requirements/trainers.txt).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import typing_extensions
from support.engines.asking import judged
from support.engines.remote import RemoteEngine
from support.gateways import server
from support.pools.pool import eventually, worker
from support.pools.skyrl_trainer import adapter
from support.trainers.door_pool import LONG, TOLERANCE, Pool, door_pool, needed

from rolloutmq import BlockingRolloutClient
from rolloutmq.worker.scripted.engine import ScriptedEngine, scripted_token

if importlib.util.find_spec("renderers") is None:
    pytest.skip("the trainers' packages are not installed: make test-trainers", allow_module_level=True)

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How far is it?"}]
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pool(text_model: Path, text_engine: RemoteEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with door_pool(text_model, text_engine, tmp_path_factory.mktemp("doors")) as made:
        yield made


# --- verifiers and renderers -----------------------------------------------------------------------------------------


def train_client(pool: Pool) -> Any:
    from renderers import DefaultRendererConfig  # noqa: PLC0415
    from verifiers.v1.clients import TrainClient  # noqa: PLC0415
    from verifiers.v1.configs.client import TrainClientConfig  # noqa: PLC0415

    config = TrainClientConfig(
        base_url=f"{pool.url}/v1", api_key_var="NONE", renderer=DefaultRendererConfig(), renderer_model_name=pool.path
    )
    return TrainClient(config)


async def test_verifiers_train_client_in_a_talk_of_several_turns(pool: Pool) -> None:
    """Its strict checks of ids and evidence; the next prompt begins with the tokens of the turn before."""
    from verifiers.v1.dialects.chat import ChatDialect  # noqa: PLC0415
    from verifiers.v1.errors import ProviderError  # noqa: PLC0415
    from verifiers.v1.types import SamplingConfig  # noqa: PLC0415

    client, sampling = train_client(pool), SamplingConfig(max_tokens=12, temperature=1.0)
    talk = list(TALK)
    for turn in range(3):
        answer = await client.get_response(ChatDialect(), {"messages": talk, "model": pool.path}, sampling, "trace-1")
        tokens = answer.tokens
        shown = pool.tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        assert tokens.prompt_ids == shown
        pool.check(tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs)
        talk += [{"role": "assistant", "content": answer.message.content or ""}]
        talk += [{"role": "user", "content": f"And then, {turn}?"}]
    with BlockingRolloutClient(pool.redis) as trainer:
        assert len(trainer.take_session("trace-1").turns) == 3
    much = [{"role": "user", "content": "far " * 20_000}]
    with pytest.raises(ProviderError) as refused:
        await client.get_response(ChatDialect(), {"messages": much, "model": pool.path}, sampling)
    assert refused.value.status_code == 400
    await client.close()


async def test_a_loop_of_verifiers_client_and_folders_of_weights_learns(pool: Pool) -> None:
    """REINFORCE for tokens with even ids: rollouts by verifiers' client, weights as prime-rl brings them."""
    import torch  # noqa: PLC0415
    from verifiers.v1.dialects.chat import ChatDialect  # noqa: PLC0415
    from verifiers.v1.types import SamplingConfig  # noqa: PLC0415

    client, sampling = train_client(pool), SamplingConfig(max_tokens=16, temperature=1.0)
    optimizer, rewards = torch.optim.Adam(pool.model.parameters(), lr=3e-3), []
    async with httpx.AsyncClient(base_url=pool.url, timeout=60) as admin:
        for _ in range(12):
            asked = (
                client.get_response(ChatDialect(), {"messages": TALK, "model": pool.path}, sampling) for _ in range(16)
            )
            turns = [answer.tokens for answer in await asyncio.gather(*asked)]
            even = [torch.tensor([token % 2 == 0 for token in it.completion_ids], dtype=torch.float32) for it in turns]
            rewards.append(float(torch.cat(even).mean()))
            optimizer.zero_grad()
            for it, good in zip(turns, even, strict=True):
                ids = torch.tensor([[*it.prompt_ids, *it.completion_ids]])
                rows = torch.log_softmax(pool.model(ids).logits[0, len(it.prompt_ids) - 1 : -1], -1)
                sampled = rows.gather(1, ids[0, len(it.prompt_ids) :, None])[:, 0]
                (-(good - rewards[-1]) * sampled).mean().backward()
            optimizer.step()
            folder = pool.checkpoint()
            for path, body in (
                ("/pause?mode=keep", None),
                ("/update_weights", {"weight_dir": str(folder)}),
                ("/resume", None),
            ):
                assert (await admin.post(path, json=body)).status_code == 200
            shutil.rmtree(folder)
    await client.close()
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


# --- TRL -------------------------------------------------------------------------------------------------------------


def test_trls_vllm_client(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation, chat, a teacher's log-probabilities, and what it asks before it sends weights.

    It asks whether vLLM is installed at its own side: that has the CUDA communicator.
    """
    theirs = needed("trl.generation.vllm_client")
    monkeypatch.setattr(theirs, "is_vllm_available", lambda **_: True)
    client = theirs.VLLMClient(base_url=pool.url, connection_timeout=30.0)
    assert client.get_world_size() == 1
    info = client.get_server_info()
    assert info["weight_transfer_config"] is not None
    assert info["model_config"]["dtype"] == "torch.bfloat16"
    prompts = [[5, 6, 7], [8, 9]]
    found = client.generate(prompts, n=2, max_tokens=6, temperature=1.0)
    assert found["prompt_ids"] == prompts
    for place, (ids, rows) in enumerate(zip(found["completion_ids"], found["logprobs"], strict=True)):
        pool.check(prompts[place // 2], ids, [row[0] for row in rows])
    chat = client.chat([TALK], n=1, max_tokens=6)
    pool.check(chat["prompt_ids"][0], chat["completion_ids"][0], [row[0] for row in chat["logprobs"][0]])
    scored = client.get_sequence_logprobs([[5, 6, 7, 8, 9]], [3], top_logprobs=1)
    own = judged(pool.model, [5, 6, 7, 8, 9])
    np.testing.assert_allclose(np.ravel(scored["actual_logprobs"][0]), [own[2, 8], own[3, 9]], atol=TOLERANCE)
    client.reset_prefix_cache()


# --- SkyRL -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def skyrl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # SkyRL is written for Python 3.12. Pydantic takes its typed dictionaries on 3.11 if they are of this kind.
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    return needed("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")


async def test_skyrls_remote_inference_client(pool: Pool, skyrl: ModuleType) -> None:
    async with skyrl.RemoteInferenceClient(
        proxy_url=pool.url, server_urls=[pool.url], data_parallel_size=1, model_name=pool.path, tokenizer=pool.tokenizer
    ) as client:
        assert await client.get_world_size() == (1, 1)
        prompts, params = [[5, 6, 7], [8, 9]], {"max_tokens": 6, "temperature": 1.0, "logprobs": 1}
        batch = {"prompt_token_ids": prompts, "sampling_params": params, "session_ids": ["one", "two"]}
        found = await client.generate(batch)
        for prompt, ids, logprobs in zip(prompts, found["response_ids"], found["response_logprobs"], strict=True):
            pool.check(prompt, ids, logprobs)
        assert set(found["stop_reasons"]) <= {"stop", "length"}
        chunks = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        asked = {
            "prompt": chunks,
            "num_samples": 2,
            "sampling_params": {"max_tokens": 4},
            "include_prompt_logprobs": True,
        }
        sampled = await client.sample({"json": asked})
        assert len(sampled["sequences"]) == 2
        for sequence in sampled["sequences"]:
            pool.check([5, 6, 7], sequence["tokens"], sequence["logprobs"])
        own = judged(pool.model, [5, 6, 7])
        assert sampled["prompt_logprobs"][0] is None
        np.testing.assert_allclose(sampled["prompt_logprobs"][1:], [own[0, 6], own[1, 7]], atol=TOLERANCE)
        tokens = await client.tokenize(["Hello"])
        assert await client.detokenize(tokens) == ["Hello"]
        for mode in skyrl.PauseMode:
            ran = asyncio.create_task(client.generate(batch | {"sampling_params": params | {"max_tokens": 200}}))
            await eventually(lambda: pool.running > 0)
            await client.pause(mode)
            waits = asyncio.create_task(client.generate(batch))
            await client.reset_prefix_cache()
            await asyncio.sleep(0.2)  # nothing to wait for: it has to be still waiting
            assert not waits.done()
            await client.resume()
            assert len((await waits)["response_ids"]) == 2
            reasons = set((await ran)["stop_reasons"])
            assert reasons == {"abort"} if mode.value == "abort" else reasons <= {"stop", "length"}
        await client.finish_session("one")


async def test_skyrls_simulated_training_runs_to_its_end(pool: Pool, skyrl: ModuleType, tmp_path: Path) -> None:
    """Its fully asynchronous trainer, whose steps are pauses: generation and staleness are as in a real one."""
    sim, configs = needed("skyrl.train.fully_async_trainer_sim"), needed("skyrl.train.config.config")
    datasets, generators = needed("skyrl.train.dataset.dataset"), needed("skyrl.train.generators.skyrl_gym_generator")
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps(row(number)) + "\n" for number in range(16)))
    config = configs.SkyRLTrainConfig.from_cli_overrides([
        f"data.train_data=['{rows}']", "data.val_data=[]", "data.dataloader.num_workers=0", "trainer.epochs=1",
        f"trainer.policy.model.path={pool.path}", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4",
        "trainer.micro_train_batch_size_per_gpu=1", "trainer.micro_forward_batch_size_per_gpu=1",
        "trainer.eval_interval=-1", "trainer.ckpt_interval=-1", "trainer.hf_save_interval=-1",
        "trainer.update_ref_every_epoch=false", "trainer.resume_mode=none", "trainer.max_prompt_length=256",
        "trainer.fully_async.enabled=true", "trainer.fully_async.simulate_training=true",
        "trainer.fully_async.simulate_training_step_seconds=0.1", "trainer.fully_async.max_staleness_steps=2",
        "trainer.fully_async.num_parallel_generation_workers=8", "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.algorithm.use_kl_loss=false", "trainer.placement.colocate_all=false",
        "generator.n_samples_per_prompt=2", "generator.max_turns=1", "generator.batched=false",
        "generator.sampling_params.max_generate_length=16", "generator.sampling_params.logprobs=1",
        "generator.inference_engine.run_engines_locally=false",
        f"generator.inference_engine.external_proxy_url={pool.url}",
        f"generator.inference_engine.external_server_urls=['{pool.url}']",
        "generator.inference_engine.enable_ray_prometheus_stats=false",
    ])  # fmt: skip
    data = datasets.PromptDataset(config.data.train_data, pool.tokenizer, max_prompt_length=256, num_workers=1)
    logged: list[dict[str, Any]] = []
    tracker = SimpleNamespace(log=lambda said, **_: logged.append(said), finish=lambda: None)
    async with skyrl.RemoteInferenceClient(
        proxy_url=pool.url, server_urls=[pool.url], data_parallel_size=1, model_name=pool.path, tokenizer=pool.tokenizer
    ) as client:
        made = generators.SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, client, pool.tokenizer)
        trainer = sim.FullyAsyncTrainerSim(
            cfg=config, tracker=tracker, tokenizer=pool.tokenizer, train_dataset=data, inference_engine_client=client,
            generator=made,
        )  # fmt: skip
        await trainer.train()
        assert client.weight_version >= 4, "a sync before the first step, and one after each"
    assert len(logged) >= 4
    assert pool.ask("/is_paused") == {"is_paused": False}


def row(number: int) -> dict[str, Any]:
    """A row of SkyRL's data."""
    prompt = [{"role": "user", "content": f"How much is {number}?"}]
    checked = {"method": "rule", "ground_truth": str(number)}
    return {"prompt": prompt, "env_class": "gsm8k", "reward_spec": checked, "uid": str(number)}


# --- prime-rl --------------------------------------------------------------------------------------------------------


async def test_prime_rls_pool_of_inference(pool: Pool) -> None:
    """Ready, model, weights of a folder, and log-probabilities of a prompt, by its orchestrator's client."""
    client = needed("prime_rl.utils.client")
    configs = needed("prime_rl.configs.shared")
    config = configs.ClientConfig(base_url=f"{pool.url}/v1", api_key_var="NONE")
    inference = client.InferencePool(config, pool.path)
    await inference.wait_for_ready(pool.path, timeout=30)
    before = pool.version
    folder = pool.perturbed()
    await inference.update_weights(folder, step=1)
    shutil.rmtree(folder)
    assert pool.version == before + 1
    # Its own scorer checks the answer with a class of vLLM's.
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": pool.path, "token_ids": [5, 6, 7, 8], "sampling_params": params}
    async with httpx.AsyncClient(base_url=pool.url) as http:
        first, *scored = (await http.post("/inference/v1/generate", json=body)).json()["prompt_logprobs"]
    own = judged(pool.model, [5, 6, 7, 8])
    assert first is None
    found = [row[str(token)]["logprob"] for row, token in zip(scored, (6, 7, 8), strict=True)]
    np.testing.assert_allclose(found, [own[0, 6], own[1, 7], own[2, 8]], atol=TOLERANCE)
    await inference.stop()


async def test_prime_rls_adapter_of_each_step(redis_db: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name, and a folder a step, which may be seen later here than where it was written. SGLang has none on CPU."""
    client, configs = needed("prime_rl.utils.client"), needed("prime_rl.configs.shared")
    caplog.set_level(logging.INFO)
    async with (
        worker(redis_db, engine=ScriptedEngine(lora=True)),
        server(redis_db, weights_from=tmp_path) as here,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{here.port}", timeout=60) as http,
    ):
        config = configs.ClientConfig(base_url=f"http://127.0.0.1:{here.port}/v1", api_key_var="NONE")
        inference = client.InferencePool(config, "scripted")
        for step in (1, 2):
            folder = tmp_path / f"step_{step}"
            asked = asyncio.create_task(inference.update_weights(folder, lora_name="policy", step=step))
            await eventually(lambda seen=step: caplog.text.count('"POST /load_lora_adapter" 404') == seen)
            written = tmp_path / f"of {step}"
            written.mkdir()
            adapter(written)
            written.rename(folder)
            await asked
            served = {it["id"]: it["weight_version"] for it in (await http.get("/v1/models")).json()["data"]}
            assert served == {"scripted": 0, "policy": step}
            body = {"input_ids": [1, 2, 3], "lora_path": "policy", "sampling_params": {"max_new_tokens": 4}}
            found = (await http.post("/generate", json=body)).json()
            stream = f"{found['meta_info']['id']}0000"
            assert found["output_ids"] == [scripted_token(stream, 3 + at, 0, f"policy@{step}") for at in range(4)]
        await client.unload_lora_adapter(inference._admin_clients, "policy")
        assert caplog.text.count('"POST /v1/unload_lora_adapter" 200') == 1
        await inference.stop()


async def test_prime_rls_concurrency_follows_the_queue(pool: Pool) -> None:
    """Its collector reads the pool as one engine; its controller stops growing, and cuts, while our queue is long."""
    needed("prime_rl.utils.client")
    concurrency, metrics = (needed(f"prime_rl.orchestrator.{it}") for it in ("concurrency", "inference_metrics"))
    configs = needed("prime_rl.configs.orchestrator")
    config = configs.ConcurrencyConfig(initial_inflight=64, min_inflight=4)
    controller = concurrency.ConcurrencyController(config, fallback_cost=1000)
    limits: list[int] = []
    controller.bind(set_limit=limits.append, get_inflight=lambda: 64, on_overload=lambda _: None)
    async with httpx.AsyncClient(base_url=pool.url, limits=httpx.Limits(max_connections=128)) as admin:
        collector = metrics.InferenceMetricsCollector([admin], on_load=controller.observe, log_to_wandb=False)
        assert await collector.probe()
        assert controller.signal == "clear"
        assert controller.can_grow
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": LONG, "ignore_eos": True}}
        asked = [asyncio.create_task(admin.post("/inference/v1/generate", json=body, timeout=120)) for _ in range(40)]
        await eventually(lambda: pool.waiting > 20)
        for _ in range(concurrency.QUEUE_PERSISTENCE_POLLS):
            await collector.collect_and_log()
        assert not controller.can_grow
        assert limits, "the queue has cut the number of episodes in flight"
        assert limits[-1] < 64
        await admin.post("/abort_requests", json={}, timeout=60)
        assert {(await it).json()["choices"][0]["finish_reason"] for it in asked} <= {"abort", "length"}
