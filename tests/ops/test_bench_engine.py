"""`rolloutmq bench engine`, small: both sides get the same prompts, others every round, and the figures are theirs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec

import pytest

from rolloutmq.ops.bench.workload import Workload


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rolloutmq.ops.entry", "bench", "engine", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_on_a_cpu() -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    done = bench("--shape", "tiny", "--prompts", "24", "--max-running", "8", "--max-new-tokens", "16", "--rounds", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "round 2: direct" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tokens = [Workload(24, 16, 4096, seed=number).tokens for number in range(2)]
    assert (found["model"], found["rounds"], found["max_running"]) == ("tiny-shaped", 2, 8)
    assert found["tokens_per_round"] == round(statistics.mean(tokens))
    assert tokens[0] != tokens[1]
    assert len(found["ratios"]) == 2
    assert min(found["ratios"]) > 0
    assert found["ratio"] == pytest.approx(found["pool_tok_s"] / found["direct_tok_s"], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--shape", "7b"), "--shape '7b': one of tiny, tiny-moe, 0.6b"),
        (("--shape", "tiny", "--model", "m"), "--model 'm', --shape 'tiny': one of them"),
    ],
)
def test_what_model_is_meant_is_said_once(options: tuple[str, ...], word: str) -> None:
    done = bench(*options)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
