"""verl loads this module by the entry point `rolloutmq` of the group `verl.plugins`, in each of its processes.

It registers the rollout `rolloutmq` and the checkpoint engine of that name.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from .settings import NAME

VERL = "0.9"
"""The version of verl that this is written for."""
log = logging.getLogger(__name__)


def register() -> None:
    """Raises ImportError for another version of verl, or where verl itself cannot be imported."""
    found = version("verl")
    if found.split(".")[:2] != VERL.split("."):
        raise ImportError(f"the rollout {NAME!r} needs verl {VERL}, and {found} is installed")
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: PLC0415 – only after the version is known
    from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: PLC0415

    from . import checkpoint  # noqa: F401, PLC0415 – registers itself

    RolloutReplicaRegistry.register(NAME, _replica)
    _ROLLOUT_REGISTRY[NAME, "async"] = f"{__package__}.adapter.PoolServerAdapter"


def _replica() -> Any:
    from .replica import PoolReplica  # noqa: PLC0415

    return PoolReplica


try:
    register()
except Exception as error:
    log.warning("verl has no rollout %r: %s", NAME, error)  # verl itself says this to nobody
    raise
