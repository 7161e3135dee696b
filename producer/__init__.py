"""The trainer's side of a pool."""

from .blocking import BlockingRolloutClient
from .calls.delta import Delta
from .calls.session import Session
from .calls.tasks import similarity
from .client import Group, JobHandle, RolloutClient

__all__ = ["BlockingRolloutClient", "Delta", "Group", "JobHandle", "RolloutClient", "Session", "similarity"]
