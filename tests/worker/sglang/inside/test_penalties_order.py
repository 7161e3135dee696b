"""Penalties are summed in one order, in every process and however many legs a sample has: sums are rounded."""

from __future__ import annotations

import subprocess
import sys

SUMMED = """
import json
from types import SimpleNamespace

import torch

from rolloutmq.worker.cpu_support import prepare_engine

prepare_engine()
from rolloutmq.worker.sglang.inside import penalties
from rolloutmq.worker.sglang.wire import GENERATED, KEY

penalties.install()
from sglang.srt.sampling import penaltylib as lib

kinds = [lib.BatchedFrequencyPenalizer, lib.BatchedPresencePenalizer, lib.BatchedRepetitionPenalizer]
sampled = [1, 3, 1, 1, 2, 1, 1, 1, 3, 1]


def penalized(kinds, before):
    sampling = SimpleNamespace(
        frequency_penalty=0.7,
        presence_penalty=0.3,
        repetition_penalty=1.2,
        custom_params={KEY: json.dumps({GENERATED: before})},
    )
    request = SimpleNamespace(sampling_params=sampling, origin_input_ids=[9, *sampled[:before]], output_ids=[])
    batch = Batch(request)
    orchestrator = lib.BatchedPenalizerOrchestrator(10, batch, kinds)
    for token in sampled[before:]:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    logits = torch.linspace(-8, 8, 10)[None].clone()
    orchestrator.apply(logits)
    return logits


class Batch:
    device = "cpu"

    def __init__(self, request):
        self.reqs = [request]


first = penalized(kinds, 0)
assert torch.equal(penalized(kinds[::-1], 0), first)
for before in range(1, 11):
    assert torch.equal(penalized(kinds, before), first), before
"""


def test_penalties_are_the_same_bits_in_any_order_of_the_set_and_after_any_leg() -> None:
    ran = subprocess.run([sys.executable, "-c", SUMMED], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
