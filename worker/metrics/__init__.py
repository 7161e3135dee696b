"""A worker's metrics and probes over HTTP, and the HTTP server of the exporter too.

`Histogram`, `Pace`, `Startup`, `StatusReport` and `Vitals` load nothing. The rest needs
prometheus_client.
"""

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .families import worker_families
    from .histogram import SYNC_BOUNDS, Histogram, finite
    from .kinds import counter, counters, distribution, gauge, gauges
    from .server import MetricsServer
    from .startup import PHASES, Startup
    from .status import Pace, StatusReport
    from .vitals import Vitals

__all__ = [
    "PHASES",
    "SYNC_BOUNDS",
    "Histogram",
    "MetricsServer",
    "Pace",
    "Startup",
    "StatusReport",
    "Vitals",
    "counter",
    "counters",
    "distribution",
    "finite",
    "gauge",
    "gauges",
    "worker_families",
]
__getattr__, __dir__ = lazy(
    __name__, __all__, ".histogram", ".startup", ".vitals", ".status", ".kinds", ".server", ".families"
)
