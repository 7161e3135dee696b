"""`rolloutmq exporter`: a pool's metrics for Prometheus, read from Redis on a timer and not when somebody asks."""

from .exporter import run_exporter

__all__ = ["run_exporter"]
