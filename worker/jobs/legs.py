"""One engine request of a sample, and which weights sampled which of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...messages.model import Segment


@dataclass(slots=True)
class Leg:
    """A request from when it is made until its output is taken in.

    version: of the weights it began under. switching: weights are being switched right now, and nobody can say yet
    which version sampled its newest tokens. spoiled: nobody ever will; what it generated must not be used.
    """

    request_id: str
    version: int
    switching: bool = False
    spoiled: bool = False
    _switches: list[Segment] = field(default_factory=list)  # what was sampled up to each switch

    def switch(self, version: int, count: int) -> None:
        """Tokens from number `count` of this leg on are sampled by `version`; the earlier ones keep theirs."""
        count = max(0, count)
        before = sum(segment.tokens for segment in self._switches)
        self._switches.append(Segment(self.version, max(0, count - before)))
        self.version = version

    @property
    def crossed(self) -> bool:
        """Whether the weights were switched while its request was in the engine."""
        return bool(self._switches)

    def segments(self, count: int) -> list[Segment]:
        """The versions of the leg's first `count` tokens. Switches beyond them do not appear: they came too late."""
        found: list[Segment] = []
        for version, tokens in self._switches:
            if taken := min(tokens, count):
                found.append(Segment(version, taken))
                count -= taken
        if count:
            found.append(Segment(self.version, count))
        return found
