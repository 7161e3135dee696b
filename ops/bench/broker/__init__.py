"""`rolloutmq bench queue`: lifecycles of jobs beside other queues; `rolloutmq bench idle`: what waiting costs Redis."""

from .bench import LEVELS, Plan, parse_levels, run_queue_bench
from .environments import describe_host, parse_peers
from .idle import Crowd, run_idle_bench
from .turn import BenchFailed

__all__ = [
    "LEVELS",
    "BenchFailed",
    "Crowd",
    "Plan",
    "describe_host",
    "parse_levels",
    "parse_peers",
    "run_idle_bench",
    "run_queue_bench",
]
