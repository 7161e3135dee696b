"""`benchmarks engine`, small: both sides get the same prompts, others every round, and the figures are theirs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks import harness
from benchmarks.engine import Plan
from benchmarks.workload import PROCESSORS, Workload
from rolloutmq.messages.errors import ConfigError


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_on_a_cpu() -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    options = {"shape": "tiny", "prompts": 24, "max-running": 8, "max-new-tokens": 16, "rounds": 2}
    command = [sys.executable, "-m", "benchmarks", "engine"]
    command += [*(f"--{name}={value}" for name, value in options.items()), "--watched", "--processors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "round 2: direct" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tokens = [Workload(24, 16, 4096, seed=number).tokens for number in range(2)]
    assert (found["model"], found["rounds"], found["max_running"]) == ("tiny-shaped", 2, 8)
    assert found["tokens_per_round"] == round(statistics.mean(tokens))
    assert tokens[0] != tokens[1]
    assert len(found["ratios"]) == 2
    assert min(found[f"{side}_ratio"] for side in ("metrics", "traces", *PROCESSORS)) > 0
    spent = found["cpu_us_per_job"]
    assert set(spent) == {"pool", "metrics", "traces", *PROCESSORS}
    assert min(spent[side][name] for side in spent for name in ("client", "worker", "engine", "redis")) > 0
    assert [side for side in spent if spent[side]["exporter"]] in (["metrics"], [])  # it may be too quick to be seen
    assert set(found["added_cpu"]) == {"metrics", "traces"}
    assert min(found["ratios"]) > 0
    rounded = 1e-4 + 0.05 * (1 + found["ratio"]) / found["direct_tok_s"]  # of one digit behind the point
    assert found["ratio"] == pytest.approx(found["pool_tok_s"] / found["direct_tok_s"], abs=rounded)


@pytest.mark.parametrize(
    ("model", "shape", "word"),
    [
        (None, "7b", "--shape '7b': one of tiny, tiny-moe, 0.6b"),
        ("m", "tiny", "--model 'm', --shape 'tiny': one of them"),
        ("/no/such/model", None, "there is no such folder or file"),
    ],
)
def test_what_model_is_meant_is_said_once(model: str | None, shape: str | None, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        harness.run(Plan(model, shape), quiet=True)
