"""From whom each receiver takes a version: a tree that grows as they come, and mends itself as they go.

The sender gives DIRECT of them a copy: with each one more all copies take longer. Every other one takes it from a
receiver that has it or is getting it, bucket by bucket behind that one, EACH at a time. It is a pure policy: nothing
here connects to anybody. docs/capacity.md has what it was measured to do.
"""

from __future__ import annotations

import heapq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

DIRECT = 2
EACH = 2


@dataclass(slots=True)
class _Receiver:
    address: str
    order: int
    above: str | None = None
    depth: int = 0
    below: set[str] = field(default_factory=set)
    done: bool = False


class RelayTree:
    """The receivers of one version. They have names; "" is the sender, which is no receiver.

    copies: how many the sender has been asked for. late: whether who comes now is late. It then spares the sender, as
    far as receivers have the version.
    """

    def __init__(self) -> None:
        self.copies = 0
        self.late = False
        self._known: dict[str, _Receiver] = {}
        self._at: dict[str, str] = {}
        self._free: list[tuple[int, int, str]] = []
        self._number = 0

    def join(self, who: str, address: str) -> None:
        """Note a receiver. address: where it offers what it gets, "" if it does not."""
        self.gone(who)
        if (before := self._at.get(address)) is not None:  # the same process under another name
            self.gone(before)
        if address:
            self._at[address] = who
        self._number += 1
        self._known[who] = _Receiver(address, self._number)

    def source(self, who: str, avoid: AbstractSet[str] = frozenset()) -> str:
        """Return the address of the one that `who` is to ask, "" for the sender. avoid: addresses that failed it."""
        here = self._known[who]
        self._leave(who)
        direct = self.copies < DIRECT and not avoid and not self.late
        found = "" if direct else self._nearest(who, avoid)
        here.above, here.depth = found, 1
        if found:
            above = self._known[found]
            above.below.add(who)
            here.depth = above.depth + 1
            self._may_take(found)
        else:
            self.copies += 1
        self._may_take(who)
        return self._known[found].address if found else ""

    def done(self, who: str) -> None:
        """Note that it has all of it. Who asks it waits for nothing."""
        if (here := self._known.get(who)) is not None:
            self._leave(who)
            here.done, here.depth = True, 0
            self._may_take(who)

    def gone(self, who: str) -> None:
        """Note that it is gone. Those that took from it ask anew."""
        if (here := self._known.get(who)) is not None:
            self._leave(who)
            for child in here.below:
                self._known[child].above = None
            del self._known[who]
            if self._at.get(here.address) == who:
                del self._at[here.address]

    def _nearest(self, who: str, avoid: AbstractSet[str]) -> str:
        """Return the receiver that is likely to have the next bucket first, "" if there is none."""
        passed, found = [], ""
        while self._free and not found:
            entry = heapq.heappop(self._free)
            name = entry[2]
            its = self._known.get(name)
            if its is None or entry[:2] != (its.depth, its.order) or len(its.below) >= EACH:
                continue  # an old entry
            passed.append(entry)
            if name != who and its.address not in avoid and not self._is_below(name, who):
                found = name
        for entry in passed:
            if entry[2] != found:
                heapq.heappush(self._free, entry)
        return found

    def _is_below(self, name: str | None, who: str) -> bool:
        while name:
            if name == who:
                return True
            name = self._known[name].above if name in self._known else None
        return False

    def _leave(self, who: str) -> None:
        here = self._known[who]
        if here.above and here.above in self._known:
            self._known[here.above].below.discard(who)
            self._may_take(here.above)
        here.above = None

    def _may_take(self, who: str) -> None:
        its = self._known[who]
        if its.address and len(its.below) < EACH:
            heapq.heappush(self._free, (its.depth, its.order, who))
