"""The first version at which a property broke, found with log2(n) tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ....messages.errors import InvalidField

Broken = Callable[[int], bool | None]
"""Whether the property is broken at a version. None if that cannot be told, for example because nothing was recorded
under it."""


@dataclass(frozen=True, slots=True)
class Bisected:
    """What a bisect found.

    good: the newest version before the break that was tested. broken: the oldest version behind it that was tested.
    between: versions between the two that could not be tested: the break may be at one of them. tested: every version
    that was looked at, in that order, and whether it was broken; None where that could not be told. again: versions
    behind `broken` that were tested and are good, so that the property broke more than once.
    """

    good: int
    broken: int
    between: tuple[int, ...]
    tested: Mapping[int, bool | None]
    again: tuple[int, ...]

    def lines(self) -> list[str]:
        """For people."""
        words = {True: "broken", False: "good", None: "cannot be told"}
        lines = [f"version {version}: {words[broken]}" for version, broken in self.tested.items()]
        if self.between:
            lines.append(f"it broke between version {self.good} and version {self.broken}; those between them, "
                         f"{', '.join(map(str, self.between))}, could not be tested")  # fmt: skip
        else:
            lines.append(f"first broken version: {self.broken} ({self.good} is good)")
        if self.again:
            named = ", ".join(map(str, self.again))
            lines.append(f"it is not broken from there on: good again at {named}. There may be an earlier break.")
        return lines


def bisect(versions: Sequence[int], broken: Broken, *, also: Collection[int] = ()) -> Bisected:
    """Find where a property broke, with ceil(log2(n + 1)) tests of n versions.

    Of a property that is good up to some version and broken from there on, this is the first broken one. Of any other
    it is one of several: a broken version whose neighbour below is good. Versions that cannot be told cost a test each.

    also: versions to test, too, after the search, such as the oldest and the newest one. They may show that the
    property broke more than once.
    Raises InvalidField if there are no versions, if none can be told, or if the oldest and the newest do not differ.
    """
    ordered = sorted(set(versions))
    tested: dict[int, bool | None] = {}

    def test(version: int) -> bool | None:
        if version not in tested:
            tested[version] = broken(version)
        return tested[version]

    low, high = 0, len(ordered)  # what is below `low` is good, and what is from `high` on is broken
    while low < high:
        middle = _testable(ordered, low, high, test)
        if middle is None:
            break
        if test(ordered[middle]):
            high = middle
        else:
            low = middle + 1
    for version in sorted(set(also) & set(ordered)):
        test(version)
    bad = [version for version in ordered[high:] if tested.get(version)]
    good = [version for version in ordered[:low] if tested.get(version) is False]
    if not bad or not good:
        raise InvalidField("versions", _shown(ordered), _why_not(ordered, tested))
    again = tuple(version for version in ordered[high:] if tested.get(version) is False)
    return Bisected(good[-1], bad[0], tuple(ordered[low:high]), tested, again)


def _testable(ordered: Sequence[int], low: int, high: int, test: Broken) -> int | None:
    """The place nearest to the middle whose version can be told."""
    middle = (low + high) // 2
    for place in sorted(range(low, high), key=lambda place: abs(place - middle)):
        if test(ordered[place]) is not None:
            return place
    return None


def _shown(ordered: Sequence[int]) -> str:
    return f"{ordered[0]} to {ordered[-1]}" if ordered else "none"


def _why_not(ordered: Sequence[int], tested: Mapping[int, bool | None]) -> str:
    told = [version for version in ordered if tested.get(version) is not None]
    if not told:
        return "versions of which at least two can be tested"
    state = "broken" if tested[told[0]] else "good"
    return f"versions whose ends differ: all that were tested ({', '.join(map(str, told))}) are {state}"
