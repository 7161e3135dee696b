"""A receiver without an engine: the same transfers into a model's parameters, without generation.

It starts in seconds, and an engine in a minute. It leaves out SGLang's part of an update, one request between two
batches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import torch

from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.model import StagingPolicy
from rolloutmq.sync.receive import Receiver
from rolloutmq.sync.transfer import TransferOrder, TransferReport
from rolloutmq.worker.engine import EngineInfo

from .shapes import SHAPES

FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


class PlainModel(torch.nn.Module):  # type: ignore[misc]
    """Parameters of a shape as an engine lays them out: q, k and v in one, gate and up in one."""

    def __init__(self, tensors: Iterable[tuple[str, tuple[int, ...]]], device: torch.device) -> None:
        super().__init__()
        self._rows: dict[str, tuple[str, int, int]] = {}
        sizes: dict[str, list[int]] = {}
        for name, shape in tensors:
            stem, _, kind = name.removesuffix(".weight").rpartition(".")
            home = f"{stem}.{FUSED.get(kind, kind)}"
            start = sizes[home][0] if home in sizes else 0
            self._rows[name] = home, start, start + shape[0]
            sizes[home] = [start + shape[0], *shape[1:]]
        flat = torch.zeros(sum(math.prod(shape) for shape in sizes.values()), dtype=torch.bfloat16, device=device)
        pieces = flat.split([math.prod(shape) for shape in sizes.values()])
        for (home, size), piece in zip(sizes.items(), pieces, strict=True):
            parameter = torch.nn.Parameter(piece.view(size), requires_grad=False)
            self.register_parameter(home.replace(".", "/"), parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Do as SGLang's models do: find the parameter, cut the slice, copy."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            home, start, end = self._rows[name]
            parameters[home.replace(".", "/")].data[start:end].copy_(tensor)


class PlainEngine:
    """The part of an engine that the benchmark uses, without the engine."""

    _model: PlainModel
    _receiver: Receiver

    def __init__(self, shape: str, device: str) -> None:
        self._shape, self._device = SHAPES[shape], torch.device(device)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("none", "", self._shape.name, "bfloat16", self._device.type, self._shape.vocab, 0)

    @property
    def manager(self) -> Any:
        """Raise ConfigError: only an engine has one, and stock paths need it."""
        raise ConfigError("--plain: stock paths take an engine")

    async def start(self) -> None:
        """Make the parameters."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._model = PlainModel(self._shape.tensors(), self._device)
        self._receiver = Receiver(self._device, staging="on")

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        return await asyncio.to_thread(self._receiver.prepare, order)

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        return await asyncio.to_thread(self._receiver.commit, order.epoch, self._model, idle=True)

    async def settle(self) -> None:
        """Wait until the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    async def stage(self, policy: StagingPolicy) -> None:
        """Set whether to stage from now on."""
        self._receiver.stage(policy)

    async def close(self) -> None:
        """Do nothing."""
