"""The trainer's side of weight sync: publish a version, send it to the workers, save it."""

from .handle import PublishHandle, PublishProgress, PublishReport
from .publisher import WeightPublisher

__all__ = ["PublishHandle", "PublishProgress", "PublishReport", "WeightPublisher"]
