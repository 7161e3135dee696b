"""`rolloutmq bench queue`: lifecycles of jobs beside other queues; `rolloutmq bench idle`: what waiting costs Redis."""

from .bench import LEVELS, Plan, parse_levels, run_queue_bench
from .environments import parse_peers
from .idle import Crowd, run_idle_bench

__all__ = ["LEVELS", "Crowd", "Plan", "parse_levels", "parse_peers", "run_idle_bench", "run_queue_bench"]
