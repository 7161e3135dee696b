"""Scores every so many samples of a journal while it is being written, and notes the gaps in it."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np

from ....messages.arguments import whole_number
from ....messages.journal import Entry, Journal, read
from .. import Settings, Verdict, recorded
from .gaps import gaps_of
from .score import score

LATE_S = 60.0
"""Several writers come together, each with its own clock: an entry older than the newest by less may be new."""
REMEMBERED = 1000
"""The findings are about so many samples, the last ones that were scored."""


class Follower:
    """Counts the results that arrive in a journal and scores every `every`-th.

    About each of these it notes, in the same folder, `score_gap` and `score_gap_mean` (the largest and the mean
    absolute difference of its log-probabilities, where any is known) and `scored` (the verdict's state). Results that
    were there before do not count. settings: as `score` takes them, which gives the verdicts.
    Raises InvalidField, and ConfigError if there is no such folder, or none that can be written.
    """

    def __init__(self, folder: Path | str, every: int, settings: Settings) -> None:
        self._folder, self._every, self._settings = folder, whole_number("every", every, 1), settings
        self._seen: dict[tuple[str, int], float] = {}  # results that may be read again
        self._newest = time.time()
        self.arrived = 0
        self.states: Counter[str] = Counter()
        self._last: deque[Verdict] = deque(maxlen=REMEMBERED)
        self._new()
        self._journal = Journal(folder)

    def round(self) -> bool:
        """Score what is due since the last round. Returns whether anything was."""
        due = set()
        for entry in self._new():
            self.arrived += 1
            if self.arrived % self._every == 0:
                due.add(f"{entry.job_id}.{entry.sample}")
        if not due:
            return False
        for verdict in score(recorded(self._folder, jobs=due), self._settings):
            self.states[verdict.state] += 1
            self._last.append(verdict)
            self._note(verdict)
        return True

    def line(self) -> str:
        """How many were scored, and what is wrong."""
        gaps = gaps_of(self._last, self._settings)
        states = ", ".join(f"{count:,} {state}" for state, count in self.states.items())
        line = f"scored {self.states.total():,} of {self.arrived:,} samples: {states or 'none'}"
        if gaps.overall is not None:
            line += f"; gaps: mean {gaps.overall.mean:.1e}, largest {gaps.overall.largest:.1e}"
        return "; ".join([line, *gaps.findings])

    def close(self) -> None:
        """Write what was noted."""
        self._journal.close()

    def _new(self) -> list[Entry]:
        """Results that were not there at the last call, in the order of time. A result that comes again is not new."""
        found = []
        for entry in read(self._folder, events="result", since=self._newest - LATE_S):
            place = (entry.job_id, entry.sample)
            if place not in self._seen:
                found.append(entry)
            self._seen[place] = max(entry.at, self._seen.get(place, -math.inf))
            self._newest = max(self._newest, min(entry.at, time.time()))  # a clock that is ahead hides no others
        self._seen = {place: at for place, at in self._seen.items() if at >= self._newest - LATE_S}
        return found

    def _note(self, verdict: Verdict) -> None:
        sizes = np.abs(verdict.gaps[~np.isnan(verdict.gaps)])
        told: dict[str, float] = {}
        if sizes.size:
            told = {"score_gap": float(sizes.max()), "score_gap_mean": float(sizes.mean())}
        self._journal.note(verdict.recorded.result, scored=verdict.state, **told)
