"""Long operator work: how operations are submitted, run and watched. What needs RQ is imported by its module."""

from .run import run_here, run_operation

__all__ = ["run_here", "run_operation"]
