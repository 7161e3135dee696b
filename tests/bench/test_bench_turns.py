"""`python -m benchmarks turns`, small: with stickiness nearly all that a cache could have is found, without it less."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_on_a_cpu() -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    command = [sys.executable, "-m", "benchmarks", "turns", "--conversations=12", "--turns=4", "--concurrency=12"]
    command += ["--workers=2", "--running=4", "--rounds=1", "--prefer=60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    prompts = 12 * sum(64 + 16 + turn * 48 for turn in range(4))
    assert found["sticky"]["prompt_tokens"] == found["without"]["prompt_tokens"] == prompts
    assert found["sticky"]["of_what_could_be_found"] > 0.98
    assert found["without"]["of_what_could_be_found"] < found["sticky"]["of_what_could_be_found"]
    assert found["sticky"]["prefix_cache_hit_rate"] > 0.85
