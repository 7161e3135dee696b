"""What operators ask of a worker: each command taken once, in order, and answered."""

from .parts import WorkerParts
from .pause import lift
from .queue import Commands, beside
from .table import HANDLERS

__all__ = ["HANDLERS", "Commands", "WorkerParts", "beside", "lift"]
