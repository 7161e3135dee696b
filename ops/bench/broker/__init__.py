"""`rolloutmq bench queue`: lifecycles of jobs through the broker, beside other queues and the bare scripts."""

from .bench import Plan, run_queue_bench
from .environments import parse_peers

__all__ = ["Plan", "parse_peers", "run_queue_bench"]
