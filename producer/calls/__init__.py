"""What a client can be asked beyond submit and wait: loops, batches, sessions, streams, tasks."""

from . import tasks
from .batch import Prompt, as_jobs, generate
from .loops import Groups, Mapped, Results
from .session import Session
from .stream import Delta, Streams
from .tasks import similarity

__all__ = [
    "Delta",
    "Groups",
    "Mapped",
    "Prompt",
    "Results",
    "Session",
    "Streams",
    "as_jobs",
    "generate",
    "similarity",
    "tasks",
]
