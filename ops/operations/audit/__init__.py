"""The audit: does what is in Redis right now keep the pool's promises? Read-only, beside a pool that goes on working.

`rules` has the table of keys and says what has to hold. `look` reads each fact in one step of Redis. `sweep` looks
again at whatever seemed wrong, because a pool moves while it is read.
"""

from .sweep import Sweep

__all__ = ["Sweep"]
