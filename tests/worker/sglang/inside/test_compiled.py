"""No request waits for a compiler: what SGLang would compile in the midst of everything that runs is run as it is."""

from __future__ import annotations

import subprocess
import sys

USED_FIRST = """
import torch

from rolloutmq.worker.cpu_support import prepare_engine

prepare_engine()
from rolloutmq.worker.sglang.inside import penalties

penalties.install()
torch.compiler.set_stance("fail_on_recompile")
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.penaltylib import repetition_penalty

for module in (sampling_batch_info, repetition_penalty):
    logits = torch.tensor([[2.0, -2.0, 6.0]])
    module.apply_scaling_penalties(logits, torch.tensor([[2.0, 2.0, 1.0]]))
    assert logits.tolist() == [[1.0, -4.0, 6.0]], logits
"""


def test_the_first_repetition_penalty_compiles_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", USED_FIRST], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
