"""`python -m benchmarks episodes`, small: a worker is killed, all episodes are done, and the figures fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

EPISODES, TURNS, ANSWER = 12, 3, 32


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_on_a_cpu() -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    command = [sys.executable, "-m", "benchmarks", "episodes"]
    command += [f"--episodes={EPISODES}", f"--turns={TURNS}", "--concurrency=6", "--lease=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "killed worker-1 after" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    answers = EPISODES * TURNS
    assert (found["episodes"], found["done"], found["answers"]) == (EPISODES, EPISODES, answers)
    assert found["tokens"] == answers * ANSWER
    assert 0 < found["prefix_cache_hit_rate"] < 1
    assert found["longest_answer_before_the_kill_s"] <= found["longest_answer_s"]
    assert found["tokens_twice_share_at_most"] == round(found["tokens_twice_at_most"] / found["tokens"], 4)
    assert 1 <= found["workers_per_episode_at_most"] <= 2
