"""What becomes of a sample's tokens, logprobs, rows, segments and text where its stop is not wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolloutmq.messages import GenerateJob, SamplingParams
from rolloutmq.messages.model.results import RolloutResult
from rolloutmq.worker.engine.protocol import EngineInfo, EngineOutput
from rolloutmq.worker.jobs.sample import SampleRun

INFO = EngineInfo("none", "0", "m", "float32", "cpu", 100, 100)
TEXT = {1: "one ", 2: "two", 3: " th", 4: "ree E", 5: "ND", 9: "<eos>"}


def decode(token_ids: Any) -> str:
    return "".join(TEXT[int(token)] for token in token_ids if token != 9)


def finished(legs: list[tuple[int, list[int]]], include_stop: bool, **ended: Any) -> tuple[RolloutResult, str]:
    """legs: of (version, tokens); all but the last were interrupted."""
    sampling = SamplingParams(max_new_tokens=50, include_stop=include_stop)
    run = SampleRun(GenerateJob(text="p", sampling=sampling), np.array([7], np.int32), 0, 1, 0.0)
    for number, (version, tokens) in enumerate(legs, 1):
        run.next_request(version)
        assert run.leg is not None
        more = ended if number == len(legs) else {"finish_reason": "abort"}
        ids, values = np.array(tokens, np.int32), np.array(tokens, np.float32)
        run.absorb(run.leg, EngineOutput(ids, -values, token_arrays={"rows": values[:, None]}, **more), 0.0)
    text = run.text(decode)
    return run.result("w", INFO, text), text


STOP = {"finish_reason": "stop", "matched_stop": "ee END", "stop_tokens": 2, "stop_text": "ee END"}


def test_kept_it_is_a_part_of_everything() -> None:
    result, text = finished([(3, [1, 2]), (4, [3, 4, 5])], True, **STOP)
    assert (result.token_ids.tolist(), text, result.matched_stop) == ([1, 2, 3, 4, 5], "one two three END", "ee END")


@pytest.mark.parametrize(
    ("legs", "segments"),
    [
        ([(3, [1, 2, 3, 4, 5])], [(3, 3)]),
        ([(3, [1, 2]), (4, [3, 4, 5])], [(3, 2), (4, 1)]),
        ([(3, [1, 2, 3, 4]), (4, [5])], [(3, 3)]),
        ([(3, [1]), (4, [2, 3]), (5, [4, 5])], [(3, 1), (4, 2)]),
    ],
)
def test_everything_loses_the_tokens_with_a_part_of_it_and_text_ends_where_it_begins(
    legs: list[tuple[int, list[int]]], segments: list[tuple[int, int]]
) -> None:
    result, text = finished(legs, False, **STOP)
    assert (result.token_ids.tolist(), result.matched_stop, result.finish_reason) == ([1, 2, 3], "ee END", "stop")
    assert result.logprobs.tolist() == [-1, -2, -3]
    assert result.token_arrays["rows"].tolist() == [[1], [2], [3]]
    assert list(result.segments) == segments
    assert text == result.text == "one two thr"


def test_a_single_token_is_taken_off_as_a_whole() -> None:
    ended = {"finish_reason": "stop", "matched_stop": 9, "stop_tokens": 1}
    result, text = finished([(0, [1, 2, 9])], False, **ended)
    assert (result.token_ids.tolist(), text, result.matched_stop) == ([1, 2], "one two", 9)
    result, text = finished([(0, [9])], False, **ended)
    assert (result.token_ids.tolist(), list(result.segments), text) == ([], [], "")


def test_with_a_special_token_in_the_match_text_ends_with_the_last_token_before_it() -> None:
    ended = {"finish_reason": "stop", "matched_stop": "ee E<eos>", "stop_tokens": 2, "stop_text": "ee E<eos>"}
    result, text = finished([(0, [1, 2, 3, 4, 9])], False, **ended)
    assert (result.token_ids.tolist(), text) == ([1, 2, 3], "one two th")


def test_what_was_not_stopped_loses_nothing() -> None:
    result, text = finished([(0, [1, 2, 3])], False, finish_reason="length")
    assert (result.token_ids.tolist(), text) == ([1, 2, 3], "one two th")
