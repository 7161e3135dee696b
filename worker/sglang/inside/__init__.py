"""The half of an SGLang engine that runs in SGLang's scheduler processes. The door has the start of such a process."""

from .entry import ChildSetup, restore_environment, run_scheduler

__all__ = ["ChildSetup", "restore_environment", "run_scheduler"]
