"""`rolloutmq demo`: asynchronous RL end to end on one machine. Start reading at `run`."""

from __future__ import annotations

from .run import run_demo

__all__ = ["run_demo"]
