"""Every method of SkyRL's interfaces is there, with the parameters that its callers give by name.

Recorded from skyrl-train 0.3.1, from the guide and the audit of SkyRL's SGLang engine (January 2026), and from skyrl
0.3.0 (August 2026).
"""

from __future__ import annotations

import inspect
import sys
import types
from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Any

import pytest
from support.pools.skyrl import Numbers

from rolloutmq.messages import InvalidField
from rolloutmq.producer.skyrl import (
    InferenceEngineInput,
    InferenceEngineOutput,
    NamedWeightsUpdateRequest,
    SkyRLEngine,
    StreamingChunk,
    WeightTransferHandle,
    group_outputs_by_prompt,
)

COROUTINES = {
    "generate": ["input_batch", "model"],
    "render_chat_completion": ["request_payload"],
    "resume_generation": [],
    "finish_session": ["session_id"],
    "get_world_size": [],
    "get_remote_weight_version": ["endpoint", "timeout"],
    "chat_completion": ["request_payload"],
    "completion": ["request_payload"],
    "sleep": ["args", "kwargs", "tags", "level", "timeout", "abort_first", "drain_timeout"],
    "wake_up": ["args", "kwargs", "tags", "timeout"],
    "init_weight_update_communicator": [
        "master_addr",
        "master_port",
        "rank_offset",
        "world_size",
        "group_name",
        "backend",
        "override_existing",
        "init_info",
    ],
    "update_named_weights": ["request"],
    "start_weight_transfer": ["request"],
    "finish_weight_transfer": ["handle"],
    "overlapped_weight_sync": ["request", "pause_mode"],
    "get_weight_version": [],
    "update_weight_version": ["new_version", "abort_all_requests"],
    "load_weights_from_disk": ["model_path"],
    "validate_weights": ["names"],
    "get_weights_by_name": ["name", "truncate_size"],
    "check_weight_sync_integrity": ["expected_version"],
    "load_lora_adapter": ["lora_name", "lora_path", "pinned"],
    "unload_lora_adapter": ["lora_name"],
    "pause_generation": ["mode"],
    "continue_generation": [],
    "abort_generation": [],
    "reset_prefix_cache": ["reset_running_requests"],
    "clear_hicache_storage": [],
    "sleep_weights_only": ["timeout"],
    "wake_up_weights_only": ["timeout"],
    "sleep_all": ["timeout"],
    "wake_up_all": ["timeout"],
    "open_session": ["session_id", "capacity"],
    "close_session": ["session_id"],
    "generate_with_session": ["session_id", "input_batch", "rid", "offset", "replace", "drop_previous_output"],
    "fork_session": ["source", "target", "offset"],
    "score": ["input_ids", "output_ids", "return_hidden_states"],
    "encode": ["texts", "dimensions"],
    "encode_single": ["text", "dimensions"],
    "compute_similarity": ["text1", "text2"],
    "decode": ["token_ids"],
    "save_sharded_model": ["path", "pattern", "max_size"],
    "save_remote_model": ["remote_path", "storage_type"],
    "start_profile": [],
    "stop_profile": [],
    "teardown": [],
}
PLAIN: dict[str, list[str]] = {
    "get_endpoint_url": [],
    "tp_size": [],
    "pp_size": [],
    "dp_size": [],
    "ep_size": [],
    "get_memory_pool_size": [],
    "supports_streaming": [],
    "supports_sessions": [],
    "supports_embeddings": [],
}
DEFAULTS: dict[tuple[str, str], Any] = {
    ("generate", "model"): None,
    ("reset_prefix_cache", "reset_running_requests"): False,
    ("init_weight_update_communicator", "override_existing"): False,
    ("overlapped_weight_sync", "pause_mode"): "in_place",
    ("update_weight_version", "abort_all_requests"): True,
    ("check_weight_sync_integrity", "expected_version"): None,
    ("pause_generation", "mode"): None,
    ("load_lora_adapter", "pinned"): False,
    ("get_weights_by_name", "truncate_size"): 100,
    ("score", "return_hidden_states"): False,
    ("sleep", "timeout"): 60.0,
    ("wake_up", "timeout"): 60.0,
    ("sleep", "abort_first"): True,
    ("sleep", "drain_timeout"): 5.0,
    ("open_session", "session_id"): None,
    ("generate_with_session", "rid"): None,
    ("generate_with_session", "offset"): None,
    ("generate_with_session", "replace"): False,
    ("generate_with_session", "drop_previous_output"): False,
    ("fork_session", "target"): None,
    ("fork_session", "offset"): -1,
    ("save_remote_model", "storage_type"): "s3",
}


@pytest.mark.parametrize("name", sorted(COROUTINES | PLAIN))
def test_the_method_is_there(name: str) -> None:
    method = getattr(SkyRLEngine, name)
    parameters = inspect.signature(method).parameters
    assert inspect.iscoroutinefunction(method) == (name in COROUTINES)
    missing = set((COROUTINES | PLAIN)[name]) - set(parameters)
    assert not missing, f"{name} takes {list(parameters)}"
    for (method_name, parameter), default in DEFAULTS.items():
        if method_name == name:
            assert parameters[parameter].default == default


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (
            InferenceEngineInput,
            "prompts prompt_token_ids sampling_params session_ids return_hidden_states return_routed_experts "
            "image_data video_data audio_data mm_features cache_salt",
        ),
        (
            InferenceEngineOutput,
            "responses response_ids stop_reasons response_logprobs prompt_logprobs weight_version n_per_prompt "
            "request_ids hidden_states routed_experts",
        ),
        (
            StreamingChunk,
            "index delta_text delta_token_id delta_logprob is_finished stop_reason "
            "cumulative_text cumulative_token_ids",
        ),
        (NamedWeightsUpdateRequest, "names dtypes shapes sizes extras packed"),
    ],
)
def test_the_dictionaries_have_the_keys(kind: Any, keys: str) -> None:
    assert set(keys.split()) <= set(kind.__annotations__)


def test_a_handle_can_be_waited_for_and_asked() -> None:
    assert all(hasattr(WeightTransferHandle, name) for name in ("wait", "is_complete", "error"))


def test_groups_of_an_output() -> None:
    spans = [[{"version": str(number), "number": number, "start": 0, "end": 1}] for number in (3, 4, 5, 5)]
    output: Any = {
        "responses": list("abcd"),
        "response_ids": [[1], [2], [3], [4]],
        "stop_reasons": ["stop"] * 4,
        "response_logprobs": None,
        "weight_version": "5",
        "weight_versions": spans,
        "n_per_prompt": 2,
    }
    first, second = group_outputs_by_prompt(output)
    assert (first["responses"], first["weight_version"]) == (["a", "b"], "4")
    assert (second["response_ids"], second["weight_version"]) == ([[3], [4]], "5")
    assert first["response_logprobs"] is None
    assert len(group_outputs_by_prompt(output | {"n_per_prompt": None})) == 4


@pytest.mark.parametrize(
    "name", ["skyrl_train.inference_engines.base", "skyrl.backends.skyrl_train.inference_servers.base"]
)
def test_it_is_one_of_skyrls_where_skyrl_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class InferenceEngineInterface(ABC):
        """Stands in for SkyRL's."""

        @abstractmethod
        async def generate(self, input_batch: Any) -> Any:
            """As there."""

    for module in accumulate(name.split("."), lambda *parts: ".".join(parts)):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules[name].InferenceEngineInterface = InferenceEngineInterface  # type: ignore[attr-defined]
    assert isinstance(SkyRLEngine("redis://nowhere", tokenizer=Numbers()), InferenceEngineInterface)


@pytest.mark.parametrize(
    ("field", "value"),
    [("pool", "a b"), ("timeout_s", 0), ("receiver_ranks", 0), ("tokenizer", 5), ("weights_timeout_s", -1)],
)
def test_arguments_that_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(InvalidField):
        SkyRLEngine("redis://nowhere", **{field: value})
