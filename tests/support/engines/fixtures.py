"""A tiny model on disk and one real SGLang engine, shared by all tests: it takes seconds to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.engines import forking
from support.engines.remote import RemoteEngine
from support.pools.in_place import InPlaceEngine
from support.specimens.own_processors import OWN

from rolloutmq.worker.cpu_support import prepare_transformers
from rolloutmq.worker.sglang.engine import SGLangConfig

VOCAB_SIZE = 512
MAX_RUNNING = 8
CONTEXT = 1000
KV_TOKENS = 8192  # more than a request may have; where it is less: pools/test_engine_ops.py


class EngineUnderTest(InPlaceEngine):
    """With the loader of `substitute_loader`."""

    _weight_loader = "support.engines.substitute_loader.receive"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Engines are started from a process that has SGLang imported, from the first one on."""
    if item.get_closest_marker("sglang") is not None:
        forking.install()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a two-layer Qwen2 with random weights; no end-of-sequence token."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    path = tmp_path_factory.mktemp("tiny-model")
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Any:
    """The same model in transformers, in float32."""
    from transformers import Qwen2ForCausalLM  # noqa: PLC0415

    return Qwen2ForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tiny_model: Path) -> AsyncIterator[EngineUnderTest]:
    """Started."""
    config = SGLangConfig(
        model=str(tiny_model),
        dtype="float32",
        max_running=MAX_RUNNING,
        context_length=CONTEXT,
        max_total_tokens=KV_TOKENS,
        random_seed=1,
        hidden_states=True,
        logit_processors=OWN,
    )
    engine = EngineUnderTest(config)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with a byte-level tokenizer and an end-of-sequence token; random weights, float32."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    from rolloutmq.ops.tiny_model import write_tiny_model  # noqa: PLC0415

    path = tmp_path_factory.mktemp("text-model")
    write_tiny_model(path, context=2048, dtype="float32")
    return path


@pytest.fixture(scope="session")
def text_engine(text_model: Path) -> Iterator[RemoteEngine]:
    """An engine with a tokenizer, and with overlap scheduling, in a process of its own. Its workers serve pools."""
    config = SGLangConfig(
        model=str(text_model),
        dtype="float32",
        max_running=8,
        max_total_tokens=32768,
        overlap_schedule=True,
        hidden_states=True,
    )
    engine = RemoteEngine(config, text_model.with_name("text-engine.log"))
    yield engine
    engine.close()
