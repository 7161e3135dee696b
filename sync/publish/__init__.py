"""The trainer's side of weight sync: publish a version, send it to the workers, save it."""

from .handle import PublishHandle, PublishProgress, PublishReport
from .hub import Hub, Outgoing
from .publisher import WeightPublisher

__all__ = ["Hub", "Outgoing", "PublishHandle", "PublishProgress", "PublishReport", "WeightPublisher"]
