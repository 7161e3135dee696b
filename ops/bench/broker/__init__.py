"""`rolloutmq bench queue`: lifecycles of jobs through the broker, compared with other queues and the bare scripts."""

from .bench import LEVELS, Plan, parse_levels, run_queue_bench
from .environments import parse_peers

__all__ = ["LEVELS", "Plan", "parse_levels", "parse_peers", "run_queue_bench"]
