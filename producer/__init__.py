"""The trainer's side of a pool."""

from .blocking import BlockingRolloutClient
from .client import Group, JobHandle, RolloutClient
from .delta import Delta
from .session import Session

__all__ = ["BlockingRolloutClient", "Delta", "Group", "JobHandle", "RolloutClient", "Session"]
