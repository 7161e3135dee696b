"""The trainer's side of a pool."""

from .blocking import BlockingRolloutClient
from .calls.delta import Delta
from .calls.session import Session
from .client import Group, JobHandle, RolloutClient

__all__ = ["BlockingRolloutClient", "Delta", "Group", "JobHandle", "RolloutClient", "Session"]
