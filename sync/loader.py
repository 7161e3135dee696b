"""Runs inside the engine's processes: receives a version, verifies it, and only then touches the model.

SGLang calls `receive` on every tensor-parallel rank through its `custom_weight_loader` hook. All tensors are staged in
host memory and their digests compared with the trainer's before the first one is loaded, so that a transfer that breaks
off, or brings something else than was sent, leaves the old weights as they were.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Set
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..messages.codec import decode
from ..messages.errors import DigestMismatch, TransferTimeout
from ..messages.weights import WeightManifest
from .digest import digest
from .group import Group, join_store
from .snapshot import unpack
from .transfer import Phase, TransferOrder, TransferReport

TIED = frozenset({"lm_head.weight"})


def receive(model: Any, named_tensors: Any) -> None:
    """SGLang's hook. The one tensor holds this tensor-parallel rank; its name is JSON: {"order", "report", "model"}.

    Never raises, because an exception here ends the engine. What happened is written to `<path>.rank<r>`.
    """
    ((payload, holder),) = list(named_tensors)
    told, rank = json.loads(payload), int(holder.item())
    order = TransferOrder(**told["order"])
    names = checkpoint_names(told["model"]) if "model" in told else None
    report, _tensors = receive_tensors(order, rank, lambda tensors: model.load_weights(tensors.items()), names)
    target = Path(f"{told['report']}.rank{rank}")
    partial = target.with_suffix(target.suffix + ".part")
    with contextlib.suppress(OSError):  # a missing report is read as a failure in "load"
        partial.write_text(report.to_json())
        os.replace(partial, target)


@cache
def checkpoint_names(model: str) -> frozenset[str] | None:
    """Names of the tensors in a local safetensors checkpoint; None if there is none to look at."""
    names: set[str] = set()
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names) or None


def _check_names(sent: Set[str], expected: frozenset[str]) -> None:
    """SGLang only logs a name it does not know, and keeps the old weights of one that is not sent.

    Raises DigestMismatch naming the tensors. Tied embeddings may come with their second name or without.
    """
    strange, missing = sent - expected - TIED, expected - sent - TIED
    if strange or missing:
        what = [f"{kind} {sorted(names)[:3]}" for kind, names in (("unknown", strange), ("missing", missing)) if names]
        raise DigestMismatch(f"not the tensors of this model: {', '.join(what)}")


def receive_tensors(
    order: TransferOrder,
    tp_rank: int,
    load: Callable[[dict[str, torch.Tensor]], object] | None = None,
    names: frozenset[str] | None = None,
) -> tuple[TransferReport, dict[str, torch.Tensor]]:
    """Receive and verify what `order` announces, as its rank `rank_offset + tp_rank`; then hand it to `load`.

    names: of the tensors that must come, where that is known. Blocks up to the order's timeout. Returns the report and
    the verified tensors (none if it failed).
    """
    deadline = time.monotonic() + order.timeout_s
    phase: Phase = "rendezvous"
    marks = [time.monotonic()]

    def lap() -> float:
        marks.append(time.monotonic())
        return marks[-1] - marks[-2]

    receive_s = verify_s = load_s = 0.0
    try:
        store = join_store(order.host, order.port, order.timeout_s)
        store.set_timeout(timedelta(seconds=max(0.1, deadline - time.monotonic())))
        manifest = _manifest(store, order)
        rank = order.rank_offset + tp_rank
        left = max(0.1, deadline - time.monotonic())
        group = Group(
            store,
            order.group,
            backend=order.backend,
            rank=rank,
            world=order.world_size,
            host=order.host,
            timeout_s=left,
        )
        phase = "receive"
        buckets = [torch.empty(size, dtype=torch.uint8) for size in manifest.bucket_nbytes]
        for bucket in buckets:
            group.broadcast(bucket)
        receive_s = lap()
        phase = "verify"
        if names is not None:
            _check_names({spec.name for spec in manifest.tensors}, names)
        tensors: dict[str, torch.Tensor] = {}
        for spec, tensor in unpack(manifest, buckets):
            if (arrived := digest(tensor)) != spec.digest:
                raise DigestMismatch(f"tensor {spec.name}: digest {arrived}, the trainer sent {spec.digest}")
            tensors[spec.name] = tensor
        verify_s = lap()
        if load is not None:
            phase = "load"
            load(tensors)
            load_s = lap()
    except Exception as error:  # whatever torch or the model raises belongs into the report
        return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}"), {}
    report = TransferReport(True, "done", "", len(tensors), manifest.nbytes, receive_s, verify_s, load_s)
    return report, tensors


def _manifest(store: Any, order: TransferOrder) -> WeightManifest:
    try:
        raw = store.get(f"{order.group}/manifest")
    except RuntimeError as error:
        raise TransferTimeout(f"no manifest of version {order.version} in time: {error}") from error
    manifest = decode(bytes(raw), WeightManifest)
    if manifest.version != order.version:
        raise DigestMismatch(f"the manifest is of version {manifest.version}, {order.version} was announced")
    return manifest
