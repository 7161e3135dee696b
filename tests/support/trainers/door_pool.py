"""A pool with one worker of SGLang and a gateway for trainers' own clients, and the same model in this process."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import save_file
from support.engines.asking import judged
from support.engines.remote import RemoteEngine
from support.pools.served import Served, gateway

from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import load_tiny_model

TOLERANCE = 1e-3
"""Of a log-probability, both sides in float32."""
LONG = 1000


@dataclass
class Pool:
    """A pool with one worker and a gateway, and the model that it serves in this process."""

    redis: str
    gateway: Served
    path: str
    model: Any
    tokenizer: Any
    folder: Path
    step: int = 0

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def version(self) -> int:
        return int(self.ask("/get_weight_version")["weight_version"])

    def ask(self, path: str) -> Any:
        return httpx.get(self.url + path).json()

    def perturbed(self) -> Path:
        """New weights, in a folder; `check` judges by them from now on."""
        import torch  # noqa: PLC0415

        torch.manual_seed(self.step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
        return self.checkpoint()

    def checkpoint(self) -> Path:
        """The model's weights, in a folder as a trainer writes it."""
        self.step += 1
        folder = self.folder / f"step_{self.step}"
        folder.mkdir()
        tensors = {name: it.clone() for name, it in self.model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def check(self, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """The log-probabilities are the model's own."""
        assert len(ids) == len(logprobs) > 0
        own = judged(self.model, [*prompt, *ids])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logprobs, own[np.arange(len(ids)), ids], atol=TOLERANCE)

    @property
    def running(self) -> int:
        """Requests that run now."""
        return int(sum(it["num_running_reqs"] for it in self.ask("/v1/loads?include=core")["loads"]))

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return int(sum(it["num_waiting_reqs"] for it in self.ask("/v1/loads")["loads"]))


@contextmanager
def door_pool(model_path: Path, engine: RemoteEngine, folder: Path) -> Iterator[Pool]:
    """Serves the model. folder: below which trainers' weights are."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    model, tokenizer = load_tiny_model(model_path).eval(), AutoTokenizer.from_pretrained(model_path)
    options = ("--weights-from", str(folder), "--snapshots", str(folder / "saved"))
    with (
        EmbeddedRedis() as server,
        engine.worker(server.url),
        gateway(server.url, folder / "gateway.log", *options) as started,
    ):
        yield Pool(server.url, started, str(model_path), model, tokenizer, folder)


def needed(name: str) -> ModuleType:
    """A trainer's module; the test is left out where its package is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not on the path")
    return importlib.import_module(name)
