"""Trainers' own clients over the gateway's door of SGLang: AReaL, slime and miles, unmodified.

slime and miles are on no package index: they are tested where their sources are on the path, and for miles
sglang-router (see requirements/trainers.txt).
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.engines.remote import RemoteEngine
from support.pools.pool import eventually
from support.trainers.door_pool import LONG, Pool, door_pool, needed

if importlib.util.find_spec("renderers") is None:
    pytest.skip("the trainers' packages are not installed: make test-trainers", allow_module_level=True)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pool(text_model: Path, text_engine: RemoteEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with door_pool(text_model, text_engine, tmp_path_factory.mktemp("doors")) as made:
        yield made


# --- AReaL -----------------------------------------------------------------------------------------------------------


async def test_areals_remote_engine(pool: Pool) -> None:
    """A rollout that an update of the weights interrupts goes on with what it has, as AReaL does it."""
    remote = needed("areal.engine.sglang_remote")
    api, args = needed("areal.api"), needed("areal.api.cli_args")
    address = pool.url.removeprefix("http://")
    config = args.InferenceEngineConfig(
        experiment_name="doors", trial_name="t", max_concurrent_rollouts=4, consumer_batch_size=2, setup_timeout=30
    )
    engine = remote.RemoteSGLangEngine(config)
    engine.initialize(addr=address, train_data_parallel_size=1)
    try:
        gconfig = args.GenerationHyperparameters(max_new_tokens=60, temperature=1.0, max_tokens=2000)
        asked = api.ModelRequest(input_ids=[5, 6, 7], gconfig=gconfig, rid="a")
        found = await engine.agenerate(asked)
        pool.check([5, 6, 7], found.output_tokens, found.output_logprobs)
        long = args.GenerationHyperparameters(max_new_tokens=400, temperature=1.0, max_tokens=2000, ignore_eos=True)
        runs_on = asyncio.create_task(engine.agenerate(api.ModelRequest(input_ids=[5, 6], gconfig=long, rid="b")))
        await eventually(lambda: pool.running > 0)
        engine.pause()
        await asyncio.to_thread(engine.pause_generation)
        before, folder = pool.version, pool.perturbed()
        backend = remote.SGLangBackend()
        meta = api.WeightUpdateMeta(type="disk", path=str(folder))
        async with httpx.AsyncClient(base_url=pool.url, timeout=60) as http:
            for request in backend.build_disk_weight_update_requests(meta).requests:
                assert (await http.post(request.endpoint, json=request.payload)).json()["success"] is True
        assert pool.version == before + 1
        await asyncio.to_thread(engine.continue_generation)
        engine.resume()
        whole = await runs_on
        assert (len(whole.output_tokens), whole.stop_reason) == (400, "length")
        again = await engine.agenerate(asked)
        pool.check([5, 6, 7], again.output_tokens, again.output_logprobs)
    finally:
        engine.destroy()


# --- slime -----------------------------------------------------------------------------------------------------------


async def test_slimes_rollout_and_its_engine(pool: Pool) -> None:
    """Discovery, generation, an abort until nothing runs, and weights from its folder, by its own functions."""
    rollout, http_utils = needed("slime.rollout.sglang_rollout"), needed("slime.utils.http_utils")
    external, types = needed("slime.backends.sglang_utils.external"), needed("slime.utils.types")
    engines, control = (needed(f"slime.backends.sglang_utils.{it}") for it in ("sglang_engine", "server_control"))
    host, _, at = pool.url.removeprefix("http://").partition(":")
    (info,) = external.discover_external_engines([f"{host}:{at}"])
    assert (info.worker_type, info.num_gpus) == ("regular", 1)
    args = Namespace(
        hf_checkpoint=pool.path, sglang_server_concurrency=16, rollout_num_engines=1, rollout_temperature=1.0,
        rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=8, rollout_stop=None, rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False, sglang_dp_size=1, sglang_router_ip=host, sglang_router_port=int(at),
        ci_test=False, use_rollout_routing_replay=False, partial_rollout=True, use_distributed_post=False,
        rollout_top_p_token_ids=False, mask_offpolicy_in_partial_rollout=False, use_opd=False, opd_type=None,
        sglang_speculative_algorithm=None, router_policy=None,
    )  # fmt: skip
    http_utils.init_http_client(args)
    state = rollout.GenerateState(args)
    sample = types.Sample(index=0, prompt="How far is it?", session_id="s-1")
    done = await rollout.generate(args, sample, state.sampling_params.copy())
    prompt = pool.tokenizer.encode("How far is it?", add_special_tokens=False)
    pool.check(prompt, done.tokens[len(prompt) :], done.rollout_log_probs)
    assert done.status.value in {"completed", "truncated"}
    assert done.weight_versions == [str(pool.version)]

    long = types.Sample(index=1, prompt="And back?", session_id="s-2")
    runs_on = asyncio.create_task(rollout.generate(args, long, state.sampling_params | {"max_new_tokens": LONG}))
    await eventually(lambda: pool.running > 0)
    await control.abort_servers_until_idle(
        [it["url"] for it in (await http_utils.get(f"{pool.url}/workers"))["workers"]]
    )
    part = await runs_on
    assert part.status.value == "aborted"
    assert part.response_length == len(part.rollout_log_probs) > 0

    engine = object.__new__(engines.SGLangEngine)
    engine.args, engine.node_rank, engine.server_host, engine.server_port = args, 0, host, int(at)
    before, folder = pool.version, pool.perturbed()
    weights = threading.Thread(target=_update, args=[engine, folder, before + 1])
    weights.start()
    await asyncio.to_thread(weights.join)
    assert engine.get_weight_version() == str(before + 1)
    assert not folder.exists()
    sample = types.Sample(index=2, prompt="How far is it?")
    done = await rollout.generate(args, sample, state.sampling_params.copy())
    pool.check(prompt, done.tokens[len(prompt) :], done.rollout_log_probs)


def _update(engine: Any, folder: Path, version: int) -> None:
    """As the trainer group of slime does."""
    engine.pause_generation()
    engine.flush_cache()
    engine.update_weights_from_disk(model_path=str(folder), weight_version=str(version))
    shutil.rmtree(folder)
    engine.continue_generation()


# --- miles -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """miles' rollout functions. They import an encoder of DeepSeek V4's chats, which only miles' own SGLang has."""
    name = "sglang.srt.entrypoints.openai.encoding_dsv4"
    if importlib.util.find_spec("miles") is not None and importlib.util.find_spec(name) is None:
        parent = needed(name.rpartition(".")[0])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(parent, "encoding_dsv4", sys.modules[name], raising=False)
    needed("sglang_router")
    return needed("miles.rollout.sglang_rollout")


async def test_miles_rollout_and_its_engine(pool: Pool, rollout: Any) -> None:
    """A rollout of more groups than it needs, whose rest it aborts and keeps; a score of what was sampled; weights."""
    types, http_utils = needed("miles.utils.types"), needed("miles.utils.http_utils")
    single, bases = needed("miles.rollout.generate_hub.single_turn"), needed("miles.rollout.base_types")
    engines = needed("miles.backends.sglang_utils.sglang_engine")
    host, _, at = pool.url.removeprefix("http://").partition(":")
    args = Namespace(
        hf_checkpoint=pool.path, chat_template_path=None, sglang_server_concurrency=16, rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1, eval_num_gpus=0, rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1,
        rollout_max_response_len=8, rollout_max_context_len=None, rollout_stop=None, rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False, rollout_seed=1, sglang_dp_size=1, sglang_router_ip=host,
        sglang_router_port=int(at), sglang_router_policy="manual", use_miles_router=False, ci_test=False,
        use_rollout_routing_replay=False, use_rollout_indexer_replay=False, partial_rollout=True,
        mask_offpolicy_in_partial_rollout=False, use_distributed_post=False, sglang_speculative_algorithm=None,
        custom_generate_function_path=None, group_rm=False, rm_type="random", rollout_global_dataset=True,
        dynamic_sampling_filter_path=None, rollout_batch_size=2, over_sampling_batch_size=6, n_samples_per_prompt=2,
        rollout_sample_filter_path=None, rollout_all_samples_process_path=None, recompute_logprobs_via_prefill=True,
        lora_rank=0, lora_adapter_path=None, target_modules=None, multi_lora=False, dumper_enable=False,
        dumper_inference=None,
    )  # fmt: skip
    http_utils.init_http_client(args)
    prompt = pool.tokenizer.encode("How far is it?", add_special_tokens=False)
    made = iter(range(1000))

    def groups(count: int) -> list[list[Any]]:
        numbers = [next(made) for _ in range(count)]
        return [[types.Sample(index=it, group_index=it, prompt="How far is it?") for _ in range(2)] for it in numbers]

    state = rollout.GenerateState(args)
    out, aborted = await rollout.generate_rollout_async(args, 0, groups)
    assert len(out.samples) == 2
    for sample in (sample for group in out.samples for sample in group):
        assert sample.status.value in {"completed", "truncated"}
        assert sample.metadata["rollout_log_probs_source"] == "sglang_prefill_recompute"
        pool.check(prompt, sample.tokens[len(prompt) :], sample.rollout_log_probs)
        assert sample.weight_versions == [str(pool.version)]
    assert len(aborted) <= 4, "what ended beside those that were needed is not kept"
    assert pool.running == pool.waiting == 0

    params = state.sampling_params | {"max_new_tokens": LONG, "ignore_eos": True}
    one = types.Sample(index=1, prompt="And back?", routing_key="s-2")
    runs_on = asyncio.create_task(
        single.generate(bases.GenerateFnInput(state=state, sample=one, sampling_params=params, evaluation=False))
    )
    await eventually(lambda: runs_on.done() or pool.running > 0)
    await rollout.abort(args, 0)
    part = (await runs_on).samples
    assert part.status.value == "aborted"
    assert part.response_length == len(part.rollout_log_probs) > 0

    engine = object.__new__(engines.SGLangEngine)
    engine.args, engine.node_rank, engine.server_host, engine.server_port = args, 0, host, int(at)
    before, folder = pool.version, pool.perturbed()
    await asyncio.to_thread(_update, engine, folder, 1)  # as if it went on after a crash
    assert await asyncio.to_thread(engine.get_weight_version) == str(before + 1)
    again = types.Sample(index=2, prompt="How far is it?", routing_key="s-3")
    done = await rollout.generate(args, again, state.sampling_params.copy())
    pool.check(prompt, done.tokens[len(prompt) :], done.rollout_log_probs)
    assert done.oldest_weight_version == before + 1
