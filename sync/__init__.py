"""Weight sync, as a trainer meets it: publish a version, and learn what became of it.

Importing this package imports no torch; using a name of it does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .packing.experts import unfuse_experts
    from .packing.gather import strip_wrappers
    from .publish import PublishHandle, PublishProgress, PublishReport, WeightPublisher
    from .transfer import SyncSettings

__all__ = [
    "PublishHandle",
    "PublishProgress",
    "PublishReport",
    "SyncSettings",
    "WeightPublisher",
    "strip_wrappers",
    "unfuse_experts",
]
_WHERE = {
    "SyncSettings": "transfer",
    "strip_wrappers": "packing.gather",
    "unfuse_experts": "packing.experts",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE.get(name, 'publish')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
