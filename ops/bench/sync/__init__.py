"""`rolloutmq bench sync`: how fast weights get from a trainer into engines.

Many files: each process of the benchmark, and each path of an update, has its own.
"""

from .bench import make_plan, run_sync_bench
from .shapes import one_shape

__all__ = ["make_plan", "one_shape", "run_sync_bench"]
