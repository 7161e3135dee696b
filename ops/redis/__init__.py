"""A private redis-server, and a command's access to a pool's Redis."""

from . import parent_bound
from .access import ask, connected, reach
from .embedded import EmbeddedRedis

__all__ = ["EmbeddedRedis", "ask", "connected", "parent_bound", "reach"]
