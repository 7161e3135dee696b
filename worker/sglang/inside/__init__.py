"""The half of an SGLang engine that runs in SGLang's scheduler processes; its door is how such a process begins."""

from .entry import ChildSetup, restore_environment, run_scheduler

__all__ = ["ChildSetup", "restore_environment", "run_scheduler"]
