"""The journal: what happened in a run, in files that outlive it. `Journal` writes it, `read` reads it."""

from .entry import EVENTS, Consumed, Entry, Event, Record, attempt_record, of_announcement, versions_of
from .merge import Merged, merge
from .reader import read
from .segment import SUFFIX, TORN
from .writer import Journal

__all__ = [
    "EVENTS",
    "SUFFIX",
    "TORN",
    "Consumed",
    "Entry",
    "Event",
    "Journal",
    "Merged",
    "Record",
    "attempt_record",
    "merge",
    "of_announcement",
    "read",
    "versions_of",
]
