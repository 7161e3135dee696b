"""What a client can be asked beyond submit and wait: loops, batches, sessions, streams, tasks."""

from . import tasks
from .batch import Prompt, as_jobs, generate, prompt_fields, run
from .last_workers import LastWorkers
from .loops import Groups, Mapped, Results
from .session import GIVEN, History, Session
from .stream import Delta, Streams, Watched, versions_of
from .tasks import similarity

__all__ = [
    "GIVEN",
    "Delta",
    "Groups",
    "History",
    "LastWorkers",
    "Mapped",
    "Prompt",
    "Results",
    "Session",
    "Streams",
    "Watched",
    "as_jobs",
    "generate",
    "prompt_fields",
    "run",
    "similarity",
    "tasks",
    "versions_of",
]
