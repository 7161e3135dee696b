"""Other queues under the load of `python -m benchmarks queue`, each as its own documentation recommends for throughput.

They run in environments of their own, without this package: `python -m peers.<name>_peer worker|client URL LOAD-JSON`.
"""

from .load import Load, Tally, main

__all__ = ["Load", "Tally", "main"]
