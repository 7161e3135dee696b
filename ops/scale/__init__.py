"""How many workers a pool needs: a pure policy; and a scaler of workers, on this host or as jobs of Slurm."""

from .member import Site
from .places import Place, places
from .policy import FULL, STATES, Decision, History, PoolView, ScaleSettings, State, decide
from .process import ThisHost, leaving_with_this
from .scaler import CrashLoop, Means, Scaler
from .scaler_lock import LOCK_S, ScalerLock
from .slurm import Slurm

__all__ = [
    "FULL",
    "LOCK_S",
    "STATES",
    "CrashLoop",
    "Decision",
    "History",
    "Means",
    "Place",
    "PoolView",
    "ScaleSettings",
    "Scaler",
    "ScalerLock",
    "Site",
    "Slurm",
    "State",
    "ThisHost",
    "decide",
    "leaving_with_this",
    "places",
]
