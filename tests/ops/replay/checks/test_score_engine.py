"""What SGLang says about its own tokens, against transformers, through a pool and a journal."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engines.remote import RemoteEngine

from rolloutmq import BlockingRolloutClient, GenerateJob, LogprobOptions, SamplingParams
from rolloutmq.ops.replay import Settings, recorded
from rolloutmq.ops.replay.checks import gaps_of, score

pytestmark = pytest.mark.sglang
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": -0.4, "repetition_penalty": 1.5}


def test_bias_penalties_and_temperature_are_those_of_the_engine(
    text_engine: RemoteEngine, redis_db: str, text_model: Path, tmp_path: Path
) -> None:
    few = dict.fromkeys(range(10, 14), 6.0)  # tokens come again, so that penalties have something to do
    samplings = [
        (SamplingParams(max_new_tokens=24, ignore_eos=True), "raw"),
        (SamplingParams(max_new_tokens=24, ignore_eos=True, logit_bias=few, **PENALTIES), "raw"),
        (SamplingParams(max_new_tokens=24, ignore_eos=True, logit_bias=few, temperature=0.6, **PENALTIES), "scaled"),
    ]
    jobs = [
        GenerateJob(token_ids=range(5, 20 + place), n=2, sampling=sampling, logprobs=LogprobOptions(kind=kind))
        for place, (sampling, kind) in enumerate(samplings)
    ]
    with (
        text_engine.worker(redis_db),
        BlockingRolloutClient(redis_db, client_id="run", journal=tmp_path) as client,
    ):
        for handle in client.submit_many(jobs):
            client.wait(handle, 60)
    verdicts = score(recorded(tmp_path), Settings(model=str(text_model)))
    assert [verdict.state for verdict in verdicts] == ["same"] * 6, [verdict.reasons for verdict in verdicts]
    assert gaps_of(verdicts, Settings()).findings == ()
    assert max(verdict.largest_gap for verdict in verdicts) < 2e-5
