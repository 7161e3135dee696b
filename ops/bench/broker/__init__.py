"""`rolloutmq bench queue`, `bench idle` and `bench shards`: other queues, what waiting costs, several Redis."""

from .bench import LEVELS, Plan, parse_levels, run_queue_bench
from .environments import describe_host, parse_peers
from .idle import Crowd, run_idle_bench
from .sharded import ShardsPlan, default_drivers, parse_layouts, run_shards_bench
from .turn import BenchFailed

__all__ = [
    "LEVELS",
    "BenchFailed",
    "Crowd",
    "Plan",
    "ShardsPlan",
    "default_drivers",
    "describe_host",
    "parse_layouts",
    "parse_levels",
    "parse_peers",
    "run_idle_bench",
    "run_queue_bench",
    "run_shards_bench",
]
