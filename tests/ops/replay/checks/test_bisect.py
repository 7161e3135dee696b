"""The search for the version at which a property broke."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.messages import InvalidField
from rolloutmq.ops.replay.checks import bisect

VERSIONS = st.lists(st.integers(0, 10_000), min_size=2, max_size=200, unique=True).map(sorted)


@given(VERSIONS, st.data())
def test_the_first_broken_version_is_found_with_log2_tests(versions: list[int], data: st.DataObject) -> None:
    at = data.draw(st.sampled_from(versions[1:]))
    asked: list[int] = []

    def broken(version: int) -> bool:
        asked.append(version)
        return version >= at

    found = bisect(versions, broken)
    assert (found.broken, found.good) == (at, versions[versions.index(at) - 1])
    assert (found.between, found.again) == ((), ())
    assert asked == list(found.tested)
    assert len(asked) <= math.ceil(math.log2(len(versions) + 1))
    assert (
        len(bisect(versions, broken, also=versions[:1] + versions[-1:]).tested)
        <= math.ceil(math.log2(len(versions) + 1)) + 2
    )


@given(VERSIONS, st.booleans(), st.booleans())
def test_ends_that_do_not_differ_are_refused(versions: list[int], state: bool, all_of_them: bool) -> None:
    with pytest.raises(InvalidField, match="ends differ"):
        bisect(versions, lambda _: state, also=versions if all_of_them else ())


@given(VERSIONS, st.data())
def test_whatever_the_property_is_a_break_is_one(versions: list[int], data: st.DataObject) -> None:
    """Also of a property that comes and goes: good right below, broken there, and what contradicts that is said."""
    states = {version: data.draw(st.booleans()) for version in versions}
    try:
        found = bisect(versions, states.__getitem__, also=(versions[0], versions[-1]))
    except InvalidField:
        tested = {states[version] for version in (versions[0], versions[-1])}
        assert tested in ({True}, {False}) or (states[versions[0]], states[versions[-1]]) == (True, False)
        return
    assert states[found.broken]
    assert not states[found.good]
    assert found.good == versions[versions.index(found.broken) - 1]
    assert list(found.again) == [v for v in found.tested if v > found.broken and not states[v]]
    if not states[versions[-1]]:
        assert versions[-1] in found.again


@given(VERSIONS, st.data())
def test_versions_that_cannot_be_told_are_passed_over(versions: list[int], data: st.DataObject) -> None:
    at = data.draw(st.sampled_from(versions[1:]))
    unknown = data.draw(st.sets(st.sampled_from(versions)))
    told = [version for version in versions if version not in unknown]

    def broken(version: int) -> bool | None:
        return None if version in unknown else version >= at

    if len({version >= at for version in told}) < 2:
        with pytest.raises(InvalidField):
            bisect(versions, broken)
        return
    found = bisect(versions, broken)
    assert found.good == max(version for version in told if version < at)
    assert found.broken == min(version for version in told if version >= at)
    assert found.between == tuple(version for version in versions if found.good < version < found.broken)


def test_it_says_what_it_tested() -> None:
    found = bisect(range(1, 21), lambda version: version >= 13)
    assert found.lines()[-1] == "first broken version: 13 (12 is good)"
    assert len(found.tested) == 5
    gap = bisect(range(1, 6), lambda version: None if version == 3 else version > 3)
    assert "between version 2 and version 4" in gap.lines()[-1]
    back = bisect(range(1, 10), lambda version: 3 <= version < 9, also=[9])
    assert "good again at 9" in back.lines()[-1]
    with pytest.raises(InvalidField):
        bisect([], lambda _: True)
