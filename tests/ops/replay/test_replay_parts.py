"""A recorded sample, cut into requests."""

from __future__ import annotations

import pytest
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob
from rolloutmq.ops.replay import Recorded
from rolloutmq.ops.replay.parts import parts_of

Legs = tuple[int, ...]


@pytest.mark.parametrize(
    ("legs", "in_place", "spans", "lost"),
    [
        ((), (), [(0, 4, 3), (4, 6, 4)], [False, False]),
        ((), (4,), [(0, 4, 3), (4, 6, 4)], [False, False]),
        ((2,), (4,), [(0, 2, 3), (2, 4, 3), (4, 6, 4)], [False, False, False]),
        ((4,), (4,), [(0, 4, 3), (4, 6, 4)], [False, True]),
    ],
)
def test_parts_end_at_versions_and_new_requests(
    legs: Legs, in_place: Legs, spans: list[tuple[int, int, int]], lost: list[bool]
) -> None:
    """It takes no time, wherever the last request began: the rest of the sample has no end that could be counted to."""
    job = GenerateJob(id="a" * 32, token_ids=[5], n=1, seed=1, reply_to="me")
    one = result(
        job, 0, token_ids=range(6), logprobs=[-1.0] * 6, segments=[(3, 4), (4, 2)], legs=legs, in_place=in_place
    )
    parts = parts_of(Recorded(one, job, 1.0))
    assert [(part.start, part.end, part.version) for part in parts] == spans
    assert [part.lost for part in parts] == lost
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.switched for part in parts] == [part.start in in_place for part in parts]
