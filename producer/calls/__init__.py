"""What a client can be asked beyond submit and wait: batches, sessions, streams, tasks."""

from . import tasks
from .batch import Prompt, as_jobs, generate
from .session import Session
from .stream import Delta, Streams
from .tasks import similarity

__all__ = ["Delta", "Prompt", "Session", "Streams", "as_jobs", "generate", "similarity", "tasks"]
