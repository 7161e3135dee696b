"""A LoRA adapter as it comes to a worker: its manifest, its configuration, and its buckets, from whoever has them."""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from ...messages.errors import InvalidField, MalformedMessage
from ..receive import Arrival, asks, take
from ..tensors import check_places, values_of
from ..transfer import TransferOrder
from ..wire import Lines, fetch_manifest
from .format import MOST_BYTES, Adapter, check_config, check_tensors


def receive_adapter(lines: Lines, order: TransferOrder, name: str) -> Adapter:
    """Receive and check one version of adapter `name`. Blocks until the order's deadline at most.

    lines: kept from one to the next. Raises TransferTimeout, DigestMismatch with the tensor's name, InvalidField or
    MalformedMessage.
    """
    deadline = time.monotonic() + order.timeout_s
    lines.newest = order
    lines.withdraw("its holder takes a newer version")
    answer = lines.join(order, deadline, cuda=False, gpu="", nccl="") if order.address else None
    manifest, config = fetch_manifest(order)
    if sum(manifest.bucket_nbytes) > MOST_BYTES:
        raise InvalidField("bucket_nbytes", sum(manifest.bucket_nbytes), f"at most {MOST_BYTES} together")
    check_places(manifest)
    told = _config(config)
    arrival = Arrival(manifest, [torch.empty(nbytes, dtype=torch.uint8) for nbytes in manifest.bucket_nbytes])
    check_tensors(told, {spec.name: (spec.shape, tensor.dtype) for spec, tensor in arrival.views})
    take(
        lines,
        order,
        lambda: manifest,
        arrival,
        values_of([spec.digest for spec in manifest.tensors]),
        ask=asks(lines, order, answer, deadline),
        deadline=deadline,
        here=set(),
        config=config,
    )
    if answer is not None:
        lines.done(order, str(answer["who"]))
    return Adapter(name, order.version, told, {spec.name: tensor for spec, tensor in arrival.views})


def _config(raw: str) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the adapter's configuration is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidField("config", config, "a PEFT adapter_config")
    return check_config(config)
