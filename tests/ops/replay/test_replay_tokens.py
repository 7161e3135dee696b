"""Recorded samples generated again: by an engine whose tokens follow from a formula, and by a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq.messages.model import GenerateJob, RolloutResult, SamplingParams, Segment
from rolloutmq.ops.replay import Recorded, Settings, Verdict, regenerate
from rolloutmq.sync.disk import folder_name
from rolloutmq.sync.transfer import TransferOrder, TransferReport
from rolloutmq.worker.engine import EngineInfo, EngineOutput, EngineRequest

PROMPT = [7, 8, 9]
FINGERPRINT = {"engine": "formula-1", "model": "m", "dtype": "float32", "device": "cpu", "deterministic": "yes"}
Formula = Callable[[int, int], int]


def token_of(position: int, version: int) -> int:
    return (position * 31 + version * 7) % 90 + 10


class Engine:
    """A token follows from its place and the weights. keeps: whether prefixes of a request stay in its cache."""

    def __init__(self, formula: Formula = token_of, *, keeps: bool = True) -> None:
        self.info = EngineInfo("formula", "1", "m", "float32", "cpu", 100, 1000, deterministic=True)
        self.formula, self.keeps, self.version = formula, keeps, -1
        self.loaded: list[int] = []
        self.requests: list[EngineRequest] = []

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        return TransferReport(ok=True, phase="staged")

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        self.version = order.version
        self.loaded.append(order.version)
        return TransferReport(ok=True, phase="done")

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self.requests.append(request)
        start, tokens, stop = len(request.token_ids), [], None
        while len(tokens) < request.max_new_tokens and stop is None:
            tokens.append(self.formula(start + len(tokens), self.version))
            stop = tokens[-1] if tokens[-1] in request.sampling.stop_token_ids else None
        return EngineOutput(
            np.array(tokens, np.int32),
            np.array([-token / 100 for token in tokens], np.float32),
            "length" if stop is None else "stop",
            stop,
            0 if stop is None else 1,
            cached_tokens=start - 1 if self.keeps else 0,
        )


def sample(*segments: tuple[int, int], job: Mapping[str, Any] | None = None, **fields: Any) -> Recorded:
    """One that the formula made, with these versions and numbers of tokens. Its last token is where it had to end."""
    versions = [version for version, tokens in segments for _ in range(tokens)]
    tokens = [token_of(len(PROMPT) + i, version) for i, version in enumerate(versions)]
    told = {"id": "a" * 32, "token_ids": PROMPT, "seed": 1, "sampling": SamplingParams(max_new_tokens=len(tokens))}
    asked = GenerateJob(**(told | dict(job or {})))
    made = {
        "job_id": asked.id, "sample": 0, "n": 1, "group_id": asked.id, "token_ids": tokens, "finish_reason": "length",
        "segments": tuple(Segment(*each) for each in segments), "worker_id": "w", "attempt": 1,
        "logprobs": [-token / 100 for token in tokens], "fingerprint": FINGERPRINT,
    }  # fmt: skip
    return Recorded(RolloutResult(**(made | fields)), asked, 1.0)


@pytest.fixture
def weights(tmp_path: Path) -> Settings:
    """Versions 1 to 3."""
    for version in (1, 2, 3):
        (tmp_path / folder_name(version)).mkdir()
    return Settings(model=str(tmp_path), snapshots=tmp_path)


async def verdict(recorded: Recorded, engine: Engine, weights: Settings) -> Verdict:
    [found] = await regenerate([recorded], engine, weights)  # type: ignore[arg-type]
    return found


async def test_every_span_is_generated_behind_the_recorded_tokens_with_its_own_weights(weights: Settings) -> None:
    engine, other = Engine(), sample((3, 4), job={"id": "b" * 32})
    one = sample((1, 5), (3, 6), legs=(2, 5))
    moved: list[int] = []
    found = await regenerate([one, other], engine, replace(weights, moved=moved.append))  # type: ignore[arg-type]
    assert [each.state for each in found] == ["same", "same"]
    assert sum(moved) == sum(len(each.result.token_ids) for each in (one, other))
    assert engine.loaded == [1, 3], "every version is loaded once"
    asked = [(len(each.token_ids), each.generated, each.max_new_tokens, each.cache_key) for each in engine.requests]
    assert asked == [(3, 0, 2, "1"), (5, 2, 3, "1"), (8, 5, 6, "3"), (3, 0, 4, "3")]
    assert len({each.request_id for each in engine.requests}) == 4
    assert len({each.wanted.seed for each in engine.requests}) == 1


async def test_wrong_weights_are_named_and_the_other_spans_are_the_same(weights: Settings) -> None:
    engine = Engine(lambda position, version: token_of(position, version) + (version == 2 and position == 9))
    found = await verdict(sample((1, 4), (2, 5), (3, 3)), engine, weights)
    assert (found.state, found.first, found.version) == ("differs", 6, 2)
    assert found.token_ids[9:].tolist() == found.recorded.result.token_ids[9:].tolist()
    assert np.isnan(found.logprobs[6:9]).all()
    other = sample((2, 9), fingerprint={"engine": "formula-2"})
    reasons = " ".join((await verdict(other, engine, weights)).reasons)
    assert "it was sampled with engine 'formula-2', and generated again with 'formula-1'" in reasons
    assert "not deterministic" in reasons


@pytest.mark.parametrize("include", [True, False])
async def test_how_a_sample_ended_is_proved_too(weights: Settings, include: bool) -> None:
    stop, limit = token_of(len(PROMPT) + 4, 1), 9
    sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=(stop,), include_stop=include)
    ended = {"finish_reason": "stop", "matched_stop": stop}
    same = sample((1, 5 if include else 4), job={"sampling": sampling}, **ended)
    assert (await verdict(same, Engine(), weights)).state == "same"
    early = sample((1, 3), job={"sampling": sampling}, **ended)
    assert (await verdict(early, Engine(), weights)).state == ("differs" if include else "unverified")
    unstopped = SamplingParams(max_new_tokens=limit, include_stop=True)
    assert (await verdict(sample((1, 5), job={"sampling": unstopped}, **ended), Engine(), weights)).state == "differs"
    aborted = sample((1, 5), job={"sampling": unstopped}, finish_reason="abort")
    assert (await verdict(aborted, Engine(), weights)).state == "same", "as far as it goes"


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (sample((1, 4), job={"seed": None}), "no seed"),
        (sample((1, 4), (7, 2)), "tokens 4 to 5: there is no snapshot of version 7"),
        (sample((1, 4), job={"lora": "french"}, adapter="french", adapter_segments=(Segment(2, 4),)), "french@2"),
        (Recorded(sample((1, 4)).result, None, 1.0), "the journal does not have its job"),
        (Recorded(sample((1, 4)).result, None, 1.0, problem="its job cannot be read: newer"), "newer"),
        (sample((1, 4), token_ids=[], logprobs=[], segments=()), "no tokens"),
    ],
)
async def test_what_cannot_be_proved_says_why(weights: Settings, recorded: Recorded, reason: str) -> None:
    found = await verdict(recorded, Engine(), weights)
    assert found.state == "unverified"
    assert reason in " ".join(found.reasons)


async def test_greedy_samples_need_no_seed(weights: Settings) -> None:
    greedy = {"seed": None, "sampling": SamplingParams(max_new_tokens=4, temperature=0.0)}
    assert (await verdict(sample((1, 4), job=greedy), Engine(), weights)).state == "same"


async def test_weights_switched_in_place_need_the_cache_of_the_older_ones(weights: Settings) -> None:
    """Without it the tokens prove something only if they are the same."""
    crossed, engine = sample((1, 4), (2, 5), in_place=(4,)), Engine()
    assert (await verdict(crossed, engine, weights)).state == "same"
    assert len({request.cache_key for request in engine.requests}) == 1, "the second request finds the first one's KV"
    assert (await verdict(crossed, Engine(keeps=False), weights)).state == "same"
    wrong = Engine(lambda position, version: token_of(position, version) + (version == 2), keeps=False)
    found = await verdict(crossed, wrong, weights)
    assert (found.state, found.first) == ("unverified", None)
    assert "the first other token is 4" in found.reasons[0]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_a_hundred_jobs_of_a_real_pool_come_out_the_same(tmp_path: Path) -> None:
    """A worker was killed, and versions were published and switched in place under them."""
    command = [sys.executable, "-m", "benchmarks", "replay", "--jobs", "100", "--folder", str(tmp_path)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=580, check=False, cwd=Path(__file__).parents[3]
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["not_the_same"] == []
    assert told["summary"]["same"] == told["summary"]["samples"] >= 100
    assert told["summary"]["largest_gap"] == 0
    assert min(told["happened"].values()) > 0, told["happened"]
