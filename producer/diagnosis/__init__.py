"""Why jobs do not run: one reading of a pool, and a pure function from it to reasons, each with what to do."""

from .reading import Held, PoolReading, Refused, read_pool
from .reason import CAUSES, NO_FAULT, Cause, Reason
from .reasons import reasons
from .waits import FIRST_S, Waits, why

__all__ = [
    "CAUSES",
    "FIRST_S",
    "NO_FAULT",
    "Cause",
    "Held",
    "PoolReading",
    "Reason",
    "Refused",
    "Waits",
    "read_pool",
    "reasons",
    "why",
]
