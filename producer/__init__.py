"""The trainer's side of a pool."""

from .blocking import BlockingRolloutClient
from .client import Group, JobHandle, RolloutClient

__all__ = ["BlockingRolloutClient", "Group", "JobHandle", "RolloutClient"]
