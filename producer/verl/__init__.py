"""A pool as verl's rollout `rolloutmq`; see docs/verl.md.

`plugin` is what verl loads. It registers the replica, the server adapter and the checkpoint engine: verl's classes with
a pool behind them. What is exported here needs neither verl nor Ray: the replica's server, and the sender of weights.
"""

from .server import PoolServer
from .settings import PoolSettings
from .weights import PoolWeights

__all__ = ["PoolServer", "PoolSettings", "PoolWeights"]
