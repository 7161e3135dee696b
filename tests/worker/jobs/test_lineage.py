"""On which weights' KV cache a token was sampled: where weights changed in place, and where a sample began anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError
from support.specimens.messages import job, result

from rolloutmq.messages import GenerateJob, Partial, SamplingParams, Segment
from rolloutmq.worker.engine.protocol import EngineInfo, EngineOutput, Generated
from rolloutmq.worker.jobs.sample import SampleRun

INFO = EngineInfo("none", "0", "m", "float32", "cpu", 100, 100)


def begun(version: int) -> SampleRun:
    made = SampleRun(
        GenerateJob(token_ids=[7], sampling=SamplingParams(max_new_tokens=9)), np.array([7], np.int32), 0, 1, 0.0
    )
    made.next_request(version)
    return made


def output(count: int, reason: str = "abort") -> EngineOutput:
    return EngineOutput(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), reason)  # type: ignore[arg-type]


def absorb(sample: SampleRun, count: int, reason: str = "abort") -> None:
    assert sample.leg is not None
    sample.absorb(sample.leg, output(count, reason), 0.0)


def test_a_sample_of_one_request_says_nothing() -> None:
    sample = begun(1)
    absorb(sample, 9, "length")
    assert {"legs", "in_place"}.isdisjoint(sample.result("w", INFO, None).model_fields_set)


def test_an_interrupted_sample_says_where_its_cache_was_computed_anew() -> None:
    sample = begun(1)
    absorb(sample, 3)
    sample.next_request(2)
    absorb(sample, 0)  # interrupted before it had a token
    sample.next_request(2)
    absorb(sample, 6, "length")
    made = sample.result("w", INFO, None)
    assert (made.legs, made.in_place, made.segments) == ((3,), (), (Segment(1, 3), Segment(2, 6)))


@pytest.mark.parametrize(
    "first", [output(3), replace(output(9, "length"), retracted=True)], ids=["stopped", "retracted"]
)
def test_what_starts_over_keeps_nothing_that_was_interrupted(first: EngineOutput) -> None:
    sample = begun(1)
    sample.starts_over = True
    sample.absorb(sample.leg, first, 0.0)
    assert (len(sample.tokens), sample.finish_reason) == (0, None)
    sample.next_request(1)
    absorb(sample, 9, "length")
    made = sample.result("w", INFO, None)
    assert (len(made.token_ids), made.legs, made.segments) == (9, (), (Segment(1, 9),))


def test_lineage_goes_on_with_the_pieces_that_a_lost_worker_had_saved() -> None:
    lost = begun(1)
    lost.leg.switch(2, 2)
    pieces: list[Partial] = []
    for there in (1, 4):  # before the switch's place, and behind it
        more = Generated(np.arange(there, dtype=np.int32), np.zeros(there, np.float32))
        piece = lost.unsaved(lambda _, start, more=more: Generated(more.token_ids[start:], more.logprobs[start:]))
        lost.keep_saved(piece)
        pieces.append(piece.partial)
    assert [(piece.start, piece.legs, piece.in_place) for piece in pieces] == [(0, (), ()), (1, (), (2,))]
    after = begun(2)
    after.resume_from(pieces)
    after.next_request(2)
    absorb(after, 2)
    after.next_request(3)
    after.leg.switch(4, 1)
    absorb(after, 3, "length")
    made = after.result("w", INFO, None)
    assert made.segments == (Segment(1, 2), Segment(2, 4), Segment(3, 1), Segment(4, 2))
    assert (made.legs, made.in_place) == ((4, 6), (2, 7))


def test_a_sample_that_starts_over_forgets_its_lineage() -> None:
    sample = begun(2)
    absorb(sample, 3)
    sample.next_request(3)
    absorb(sample, 1)
    sample.next_request(1)  # on a worker with older weights
    absorb(sample, 9, "length")
    assert sample.result("w", INFO, None).legs == ()


@pytest.mark.parametrize("field", ["legs", "in_place"])
@pytest.mark.parametrize("numbers", [(2,), (1, 0), (0, 0), (-1,)])
def test_numbers_that_are_no_tokens_are_refused(field: str, numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match=field):
        result(job(), **{field: numbers})
