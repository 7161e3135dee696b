"""verl 0.9.1 itself over a pool: its replicas, trainers' side and agent loops, with Ray on this host.

The judge is the same agent loop of verl over the same weights in this process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.engines.remote import RemoteEngine
from support.trainers.by_heart import learn

from rolloutmq import BlockingRolloutClient
from rolloutmq.ops.config import load_settings
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.worker.cpu_support import prepare_transformers

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make test-trainers", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl"
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
LONGEST = 192
"""Tokens that the model and the tools say in a conversation, at most."""
NUMBER = {"type": "integer"}
TOOLS = {
    "tools": [
        {
            "class_name": "support.trainers.verl_tool.Add",
            "config": {"type": "native"},
            "tool_schema": {
                "type": "function",
                "function": {
                    "name": "add",
                    "description": "Adds two numbers.",
                    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
                },
            },
        }
    ]
}


def call(name: str, a: Any, b: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"


TALKS = (
    ("Add 3 and 4.", call("add", 3, 4), "7", "It is 7."),
    ("Add 20 and 5.", call("add", 20, 5), "26", "It is 26."),
    ("Say hi.", "Hi."),
    ("Divide 8 by 2.", call("divide", 8, 2), "Unknown function 'divide'. Available tools: ['add']", "I cannot."),
    ("Add x and 1.", call("add", "x", 1), "Error executing tool 'add': "
     'can only concatenate str (not "int") to str', "No."),
)  # fmt: skip
"""What the user says, the model, the tool, and the model again."""


@pytest.fixture(scope="module")
def example(text_model: Path, text_engine: RemoteEngine) -> Iterator[ModuleType]:
    """examples/verl/agent_loop.py, beside a pool with one worker."""
    prepare_transformers()
    with pytest.MonkeyPatch.context() as patch, EmbeddedRedis() as server, text_engine.worker(server.url):
        patch.setenv("ROLLOUTMQ_REDIS", server.url)  # Ray's processes inherit it
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("MODEL", str(text_model))
        patch.syspath_prepend(str(EXAMPLE))
        yield importlib.import_module("agent_loop")


@pytest.fixture(scope="module")
def manager(example: ModuleType) -> Iterator[Any]:
    """verl's servers in Ray: two replicas of the rollout `rolloutmq`."""
    import ray  # noqa: PLC0415
    from ray import cloudpickle  # noqa: PLC0415

    cloudpickle.register_pickle_by_value(example)
    folder = tempfile.mkdtemp(prefix="ray")  # a short path: Ray puts sockets below it
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
        runtime_env={"worker_process_setup_hook": prepare_transformers},
        _temp_dir=folder,
    )
    try:
        yield example.LLMServerManager.create(example.configuration(f"data.max_response_length={LONGEST}"))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def test_single_turns_equal_those_in_one_process_through_both_ways_of_publishing(
    example: ModuleType, manager: Any, text_model: Path
) -> None:
    config = example.configuration()
    trainers = example.start_trainers(config)
    assert len(manager.get_addresses()) == 2
    for step, backend in ((7, "rolloutmq"), (8, "naive")):
        example.publish(config, trainers, manager, step, backend)
        plain = example.Plain(example.model_at(str(text_model), step))
        rows = example.batch(step)
        pooled = example.outputs(config, manager.get_client(), rows)
        example.compare(pooled, example.outputs(config, plain, rows), step)
        assert pooled.batch["response_mask"].sum() == 24 * len(rows)


def spoken(talk: tuple[str, ...], tokenizer: Any) -> list[tuple[list[int], bool]]:
    """A talk's ids as verl's loop puts them together, and whether the model says them."""
    user, said, *rest = talk
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    parts = [(f"<|im_start|>user\n{user}{turn}", False), (f"{said}<|im_end|>", True)]
    if rest:
        parts += [(f"\n<|im_start|>tool\n{rest[0]}{turn}", False), (f"{rest[1]}<|im_end|>", True)]
    return [(tokenizer.encode(text), own) for text, own in parts]


def asked(step: int) -> Any:
    """verl's batch of the talks. Every second tool is created with a number of its own."""
    import numpy as np  # noqa: PLC0415
    from verl import DataProto  # noqa: PLC0415

    columns = {"raw_prompt": np.empty(len(TALKS), object), "tools_kwargs": np.empty(len(TALKS), object)}
    columns["raw_prompt"][:] = [[{"role": "user", "content": talk[0]}] for talk in TALKS]
    columns["tools_kwargs"][:] = [{"add": {"create_kwargs": {"more": row % 2}}} for row in range(len(TALKS))]
    return DataProto(non_tensor_batch=columns | {"index": np.arange(len(TALKS))}, meta_info={"global_steps": step})


def publish(model: Any, step: int) -> None:
    """Through verl's checkpoint engine, here."""
    from verl.checkpoint_engine import CheckpointEngineRegistry  # noqa: PLC0415

    engine = CheckpointEngineRegistry.new("rolloutmq", bucket_size=1 << 20, is_master=True)
    asyncio.run(engine.send_weights(iter(model.state_dict().items()), global_steps=step))
    engine._weights.close()


def test_a_tool_agent_equals_the_one_in_one_process(
    example: ModuleType, manager: Any, text_model: Path, tmp_path: Path
) -> None:
    """Calls that work, one whose tool raises, one of a tool that there is not. The model knows its part by heart."""
    from support.trainers.verl_tool import Add  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    (tmp_path / "tools.yaml").write_text(json.dumps(TOOLS))
    config = example.configuration(
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}",
        f"data.max_response_length={LONGEST}",
    )
    model, tokenizer = load_tiny_model(text_model), AutoTokenizer.from_pretrained(text_model)
    learn(model, [spoken(talk, tokenizer) for talk in TALKS])
    publish(model, step=9)
    pooled = example.outputs(config, manager.get_client(), asked(step=9))
    calls, Add.calls[:] = list(Add.calls), []
    plain = example.outputs(config, example.Plain(model, LONGEST), asked(step=9))
    example.compare(pooled, plain, 9)
    for name in ("__num_turns__", "turn_scores", "tool_rewards"):
        assert pooled.non_tensor_batch[name].tolist() == plain.non_tensor_batch[name].tolist()
    assert pooled.non_tensor_batch["__num_turns__"].tolist() == [4, 4, 2, 4, 4]
    assert pooled.non_tensor_batch["tool_rewards"].tolist() == [[0.5], [0.5], [], [0.0], [0.0]]
    assert sorted(map(repr, calls)) == sorted(map(repr, Add.calls))
    assert [name for name, _ in calls].count("release") == 3
    for ids, mask, talk in zip(pooled.batch["responses"], pooled.batch["response_mask"], TALKS, strict=True):
        assert ids[mask.bool()].tolist() == [token for part, own in spoken(talk, tokenizer) for token in part if own]


def test_every_handle_of_an_actor_speaks_to_one_engine_of_skyrls_interface(manager: Any, text_model: Path) -> None:
    """Ray is up here, so this is not beside SkyRL's own packages. Calls of two handles run at once."""
    import ray  # noqa: PLC0415

    from rolloutmq.producer.skyrl import SkyRLEngine  # noqa: PLC0415

    one = ray.remote(SkyRLEngine).options(name="engine").remote(tokenizer=str(text_model))
    other = ray.get_actor("engine")
    batch = {"prompt_token_ids": [[5, 6, 7], [8, 9]], "sampling_params": {"max_generate_length": 8, "temperature": 0.0}}
    outputs = ray.get([handle.generate.remote(batch) for handle in (one, other) * 4])
    assert [output["response_ids"] for output in outputs] == [outputs[0]["response_ids"]] * 8
    assert [len(ids) > 0 for ids in outputs[0]["response_ids"]] == [True, True]
    assert ray.get(one.get_weight_version.remote()) == ray.get(other.get_weight_version.remote())
    ray.get(one.teardown.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="torn down"):
        ray.get(other.generate.remote(batch))


def test_what_verl_composed_is_the_configuration_of_workers_and_clients(
    example: ModuleType, text_model: Path, tmp_path: Path
) -> None:
    from omegaconf import OmegaConf  # noqa: PLC0415

    rollout = "actor_rollout_ref.rollout"
    config = example.configuration(
        f"{rollout}.dtype=float32",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.max_assistant_turns=3",
        f"{rollout}.over_sample_rate=0.25",
    )
    file = tmp_path / "verl.yaml"
    file.write_text(OmegaConf.to_yaml(config))
    settings = load_settings(file)
    assert (settings.engine().model, settings.engine().dtype) == (str(text_model), "float32")
    assert settings.worker().first_weights == "newest"  # its load_format is dummy
    assert (settings.group_rules().over_sample_rate, settings.episode_limits().turns) == (0.25, 3)
    with BlockingRolloutClient() as client:
        (group,) = client.generate([[5, 6, 7]], **settings.job())
    assert [0 < len(result.token_ids) <= 24 for result in group.results] == [True]
