"""TRL's trainers over a pool, without vLLM; see docs/trainers.md.

`PoolRolloutWorker` and `PoolWeightTransfer` are for AsyncGRPOTrainer, `PoolRollouts` is a `rollout_func` of
GRPOTrainer. They follow TRL 1.16, parts of which have no public interface: another version is refused when this is
imported.
"""

from importlib.metadata import PackageNotFoundError, version

TRL = "1.16"
"""The version of TRL that this is written for."""
try:
    found = version("trl")
except PackageNotFoundError:
    raise ImportError(
        f"rolloutmq.producer.trl needs TRL {TRL}, which is not installed: pip install 'rolloutmq[trl]'"
    ) from None
if found.split(".")[:2] != TRL.split("."):
    raise ImportError(f"rolloutmq.producer.trl needs TRL {TRL}, and {found} is installed: pip install 'rolloutmq[trl]'")

from .cpu import prepare_cpu  # noqa: E402 – they import TRL
from .figures import PoolFigures  # noqa: E402
from .rollouts import PoolRollouts  # noqa: E402
from .samples import PoolSample  # noqa: E402
from .weights import PoolWeightTransfer  # noqa: E402
from .worker import PoolRolloutWorker  # noqa: E402

__all__ = ["PoolFigures", "PoolRolloutWorker", "PoolRollouts", "PoolSample", "PoolWeightTransfer", "prepare_cpu"]
