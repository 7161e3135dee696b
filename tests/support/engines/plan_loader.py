"""Runs inside an engine, in the place of rolloutmq's loader: a copy plan of its model, compared with `load_weights`."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.plan import CopyPlan, PlanImpossible
from rolloutmq.sync.tensors.digester import digest

BUCKET_BYTES = 100_000
"""Small, so that fused parameters are put together from several buckets."""


def check(model: Any, named_tensors: Any) -> None:
    """SGLang's hook. The tensor's name is JSON: {"weights": safetensors file, "report": where findings are written}.

    Never raises, because an exception here ends the engine.
    """
    [(text, rank)] = named_tensors
    message = json.loads(text)
    try:
        findings = compare(model, load_file(message["weights"], device=str(next(model.parameters()).device)))
    except Exception:
        findings = {"error": traceback.format_exc()}
    Path(f"{message['report']}.rank{int(rank.item())}").write_text(json.dumps(findings))


def compare(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the test wants to know; the model ends with `tensors` loaded, by the plan."""

    def state() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def wrong(expected: dict[str, torch.Tensor]) -> list[str]:
        return [name for name, value in state().items() if digest(value) != digest(expected[name])]

    before = state()
    snapshot = PackedWeights(1, tensors.items(), BUCKET_BYTES).snapshot()
    plan = CopyPlan.trace(model, snapshot.manifest.tensors)
    touched = wrong(before)
    model.load_weights(list(tensors.items()))
    expected = state()
    changed = [name for name in expected if digest(expected[name]) != digest(before[name])]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    bounds = plan.for_layout(snapshot.buckets)
    for bound in bounds:
        bound.run()
    digests = {spec.name: spec.digest for spec in snapshot.manifest.tensors}
    whole = [entry for bound in bounds for entry in bound.whole]
    partial = [entry for bound in bounds for entry in bound.partial]
    try:
        held = plan.export()
        exported = all(digest(held[name]) == digests[name] for name in held)
    except PlanImpossible as error:
        exported = str(error)
    return {
        "inference_mode": torch.is_inference_mode_enabled(),
        "model": type(model).__name__,
        "touched_by_trace": touched,
        "changed_by_load": len(changed),
        "parameters": len(before),
        "wrong_after_replay": wrong(expected),
        "missing": plan.missing,
        "unused": plan.unused,
        "superseded": list(plan.superseded),
        "whole": len(whole),
        "partial": len(partial),
        "wrong_whole": [name for name, target in whole if digest(target) != digests[name]],
        "wrong_partial": [
            name for name, source, target in partial if digest(source.to(target.dtype)) != digest(target)
        ],
        "exported": exported,
    }
