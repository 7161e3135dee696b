"""What SGLang is told at its start."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.worker.cpu_support import prepare_engine
from rolloutmq.worker.sglang.config import SGLangConfig, server_arguments
from rolloutmq.worker.sglang.engine import SGLangEngine


def told(device: Any = "cuda", **fields: Any) -> dict[str, Any]:
    return server_arguments(SGLangConfig(model="m", **fields), device, "a.loader")


@pytest.mark.parametrize(("running", "most"), [(64, 64), (256, 256), (512, 512), (1024, 1024), (4096, 1024)])
def test_whatever_is_decoded_at_once_has_a_graph(running: int, most: int) -> None:
    assert told(max_running=running)["cuda_graph_max_bs_decode"] == most


def test_without_a_word_about_requests_at_once_or_on_a_cpu_sglang_decides_about_graphs() -> None:
    assert "cuda_graph_max_bs_decode" not in told()
    assert "cuda_graph_max_bs_decode" not in told("cpu", max_running=512)


def test_the_operators_own_size_of_graphs_wins() -> None:
    assert told(max_running=512, extra={"cuda_graph_max_bs_decode": 96})["cuda_graph_max_bs_decode"] == 96


def test_an_engine_over_several_hosts_is_refused_with_the_reason() -> None:
    """It would start, and no version of the weights would ever reach the other hosts."""
    with pytest.raises(InvalidField, match=r"extra\.nnodes.*sockets of its own host") as caught:
        told(tp_size=16, extra={"nnodes": 2, "node_rank": 0})
    assert caught.value.field == "extra.nnodes"
    assert told(extra={"nnodes": 1})["nnodes"] == 1


def test_experts_that_move_are_refused_with_the_reason() -> None:
    """The copy plan of the first version would write later ones to where experts have been."""
    with pytest.raises(InvalidField, match=r"extra\.enable_eplb=True: only False: experts that move") as caught:
        told(tp_size=4, ep_size=4, extra={"enable_eplb": True})
    assert caught.value.field == "extra.enable_eplb"
    assert told(extra={"enable_eplb": False})["enable_eplb"] is False


@pytest.mark.parametrize(("name", "value"), [("hicache_storage_backend", "file"), ("enable_lmcache", True)])
def test_a_storage_of_prefixes_is_refused_with_the_reason(name: str, value: object) -> None:
    """It names pages by their tokens alone: KV of other weights would come back."""
    with pytest.raises(InvalidField, match=rf"extra\.{name}={value!r}: none: .* by their tokens alone"):
        told(extra={"enable_hierarchical_cache": True, name: value})
    assert told(extra={"enable_hierarchical_cache": True})["enable_hierarchical_cache"] is True


@pytest.mark.sglang
async def test_a_misspelt_argument_is_named_with_what_may_be_meant() -> None:
    engine = SGLangEngine(SGLangConfig(model="m", extra={"atention_backend": "triton"}))
    with pytest.raises(ConfigError, match=r"extra='atention_backend': SGLang .* has no such argument; nearest: att"):
        await engine.start()


def test_on_a_cpu_a_kv_cache_of_a_given_size_is_not_limited_by_what_others_allocate() -> None:
    assert told(device="cpu")["mem_fraction_static"] == 0.2
    assert told(device="cpu", max_total_tokens=8192)["mem_fraction_static"] == 0.5
    assert told(device="cpu", max_total_tokens=8192, mem_fraction=0.1)["mem_fraction_static"] == 0.1


@pytest.mark.sglang
def test_every_argument_is_one_of_sglangs() -> None:
    """A release that renames one would otherwise be noticed on a GPU host only."""
    prepare_engine()
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    everything = told(
        max_running=512,
        context_length=4096,
        mem_fraction=0.5,
        max_total_tokens=8192,
        attention_backend="triton",
        sampling_backend="pytorch",
        random_seed=1,
        ep_size=2,
        tp_size=2,
        max_lora_rank=8,
        hidden_states=True,
        routed_experts=True,
        deterministic=True,
        memory_saver="backup",
    )
    unknown = everything.keys() - inspect.signature(ServerArgs).parameters.keys()
    assert not unknown


def test_an_engine_that_can_sleep_captures_no_prefill_graphs() -> None:
    """SGLang raises NotImplementedError for both, on GPUs alone."""
    assert told(memory_saver="on", device="cuda")["disable_prefill_cuda_graph"]
    assert not told(device="cuda")["disable_prefill_cuda_graph"]
