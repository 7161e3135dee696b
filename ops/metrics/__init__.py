"""A pool's metrics for Prometheus (`rolloutmq exporter`), and what it needs, for who scales it.

Both read Redis on a timer, and not when somebody asks. `PoolWatch` needs no library; the exporter needs
prometheus_client.
"""

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .demand import PoolWatch
    from .exporter import Exporter, run_exporter, served
    from .reading import Reading

__all__ = ["Exporter", "PoolWatch", "Reading", "run_exporter", "served"]
__getattr__, __dir__ = lazy(__name__, __all__, ".demand", ".reading", ".exporter")
