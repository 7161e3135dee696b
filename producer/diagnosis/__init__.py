"""Why jobs do not run: one reading of a pool, and a pure function from it to reasons, each with what to do."""

from .reading import Held, PoolReading, Refused, read_pool
from .reason import CAUSES, NO_FAULT, Cause, Reason
from .reasons import reasons

__all__ = ["CAUSES", "NO_FAULT", "Cause", "Held", "PoolReading", "Reason", "Refused", "read_pool", "reasons"]
