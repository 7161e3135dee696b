"""What a score says is wrong, from gaps that are made up."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from rolloutmq.messages import RolloutResult, Segment
from rolloutmq.ops.replay import Recorded, Settings, Verdict, compared, unverified
from rolloutmq.ops.replay.checks import gaps_of

TOKENS = 8


def verdict(
    worker: str,
    version: int,
    gap: float = 1e-6,
    *,
    prompt: int = 4,
    cached: int = 0,
    dtype: str = "float32",
    **more: object,
) -> Verdict:
    """A sample of TOKENS tokens, every log-probability off by `gap`."""
    result = RolloutResult(
        job_id="j", sample=0, n=1, group_id="g", token_ids=range(TOKENS), logprobs=np.zeros(TOKENS, np.float32),
        finish_reason="length", segments=[Segment(version, TOKENS)], worker_id=worker, prompt_ids=range(prompt),
        cached_tokens=cached, fingerprint={"dtype": dtype}, **({"attempt": 1} | more),
    )  # fmt: skip
    one = Recorded(result, None, 1.0)
    return compared(one, result.token_ids, np.full(TOKENS, gap, np.float32), 1e-4, engine={"dtype": "float32"})


def pool(*broken: tuple[str, int]) -> list[Verdict]:
    """Two workers, versions 1 to 9; the broken ones (worker, version) are far off."""
    return [
        verdict(worker, version, 0.31 if (worker, version) in broken else 2e-6)
        for worker in ("w1", "w2")
        for version in range(1, 10)
    ]


@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        ([], None),
        ([("w2", version) for version in range(7, 10)], "worker w2 from version 7 on: largest gap 0.31"),
        ([("w2", 3)], "worker w2 in version 3: largest gap 0.31"),
        ([("w1", 3), ("w1", 8)], "worker w1 in versions 3, 8: largest gap 0.31"),
        ([("w1", version) for version in range(1, 10)], "worker w1 in all its versions, 1 to 9: largest gap 0.31"),
        ([(worker, 4) for worker in ("w1", "w2")], "all 2 workers in version 4: largest gap 0.31"),
    ],
)
def test_it_says_who_is_wrong_since_when(broken: list[tuple[str, int]], finding: str | None) -> None:
    gaps = gaps_of(pool(*broken), Settings())
    if finding is None:
        assert gaps.findings == ()
        assert gaps.lines()[-1] == "no token is beyond the tolerance"
        return
    assert [one.startswith(finding) for one in gaps.findings] == [True]
    assert gaps.findings[0].endswith("2e-06 at most") or gaps.findings[0].endswith("2.0e-06 at most")
    assert {version for version, one in gaps.by_version.items() if one.wrong} == {version for _, version in broken}
    assert {worker for worker, one in gaps.by_worker.items() if one.wrong} == {worker for worker, _ in broken}
    assert gaps.by_worker["w1"].tokens == 9 * TOKENS


def test_gaps_behind_a_place_point_at_positions() -> None:
    found = gaps_of([verdict("w", 1, prompt=8), verdict("w", 1, 0.2, prompt=64)], Settings())
    assert {name: one.wrong for name, one in found.by_position.items()} == {"8 to 15": False, "64 to 127": True}
    assert "only from position 64 on" in found.findings[-1]


def test_gaps_behind_a_cached_prefix_point_at_the_cache() -> None:
    found = gaps_of([verdict("w", 1), verdict("w", 1, 0.2, cached=4)], Settings())
    assert "prefix cache" in found.findings[-1]
    both = gaps_of([verdict("w", 1, 0.2), verdict("w", 1, 0.2, cached=4)], Settings())
    assert "prefix cache" not in " ".join(both.findings)


def test_half_precision_is_judged_by_means() -> None:
    def many(gaps: Iterable[float]) -> list[Verdict]:
        return [verdict("w", 1, gap, dtype="bfloat16") for gap in gaps]

    assert gaps_of(many([0.3] + [0.01] * 9), Settings()).findings == ()
    assert "worker w in version 1" in gaps_of(many([0.3] * 3 + [0.01] * 7), Settings()).findings[0]


def test_tokens_of_an_earlier_attempt_are_nobodys() -> None:
    found = gaps_of([verdict("w2", 1, 0.5, attempt=2, legs=(3, 5))], Settings())
    assert {worker: one.tokens for worker, one in found.by_worker.items()} == {"unknown": 5, "w2": 3}


def test_nothing_scored_is_said() -> None:
    found = gaps_of(
        [unverified(verdict("w", 1).recorded, "gone"), unverified(verdict("w", 1).recorded, "gone")], Settings()
    )
    assert (found.overall, found.reasons) == (None, {"gone": 2})
    assert found.lines()[0] == "2 unverified"
    assert found.lines()[-2:] == ["unverified: gone (2)", "no token could be scored"]
