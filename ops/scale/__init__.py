"""How many workers a pool needs: a pure policy; and a scaler of worker processes on one host."""

from .places import Place, places
from .policy import FULL, STATES, Decision, History, PoolView, ScaleSettings, State, decide
from .process import leaving_with_this
from .scaler import CrashLoop, LocalScaler, Means
from .scaler_lock import LOCK_S, ScalerLock

__all__ = [
    "FULL",
    "LOCK_S",
    "STATES",
    "CrashLoop",
    "Decision",
    "History",
    "LocalScaler",
    "Means",
    "Place",
    "PoolView",
    "ScaleSettings",
    "ScalerLock",
    "State",
    "decide",
    "leaving_with_this",
    "places",
]
