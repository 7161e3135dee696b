"""What operators ask of a worker: each command taken once, in order, and answered."""

from .pause import Service
from .queue import Commands, beside
from .table import worker_commands

__all__ = ["Commands", "Service", "beside", "worker_commands"]
