"""Places for workers on a host, and how often a worker has failed in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...messages.errors import InvalidField

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
FAILURES = 5
"""In a row, after which no worker is started in a place any more."""


@dataclass(slots=True)
class Place:
    """Where one worker may run. number: from 0. gpus: for CUDA_VISIBLE_DEVICES, "" leaves it alone. failures: in a row.
    not_before: on time.monotonic, when the next worker may start here."""

    number: int
    gpus: str = ""
    failures: int = 0
    not_before: float = 0.0

    def failed(self, now: float, first_pause_s: float = FIRST_PAUSE_S) -> float:
        """A worker failed here. Returns the seconds to wait, twice as many each time."""
        pause_s: float = min(LONGEST_PAUSE_S, first_pause_s * 2**self.failures)
        self.failures += 1
        self.not_before = now + pause_s
        return pause_s

    @property
    def given_up(self) -> bool:
        """Whether too many workers in a row have failed here."""
        return self.failures >= FAILURES


def places(most: int, gpus: Sequence[str] = ()) -> list[Place]:
    """Places for `most` workers. gpus: one entry for each worker, "0" or, for a worker with two GPUs, "0+1".

    Raises InvalidField if there are fewer GPUs than workers, or one is named twice.
    """
    if not gpus:
        return [Place(number) for number in range(most)]
    named = [one for entry in gpus for one in entry.split("+")]
    if not all(named) or len(set(named)) < len(named):
        raise InvalidField(
            "gpus", ",".join(gpus), "GPUs with commas between workers, such as 0,1 or 0+1,2+3, each once"
        )
    if most > len(gpus):
        raise InvalidField("max", most, f"at most {len(gpus)}, as many as --gpus has entries")
    return [Place(number, gpus[number].replace("+", ",")) for number in range(most)]
