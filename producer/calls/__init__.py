"""What a client can be asked beyond submit and wait: batches, sessions, streams, tasks."""

from . import tasks
from .blocking_session import BlockingSession
from .delta import Delta
from .prompts import Prompt
from .session import Session
from .task_calls import BlockingTaskCalls

__all__ = ["BlockingSession", "BlockingTaskCalls", "Delta", "Prompt", "Session", "tasks"]
