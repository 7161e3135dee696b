"""`rolloutmq doctor`: findings about Redis and about this host, each with what to do about it."""

from .examine import examine
from .finding import Finding, lines

__all__ = ["Finding", "examine", "lines"]
