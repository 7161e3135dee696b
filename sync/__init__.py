"""Weight sync, as a trainer meets it: publish a version, and learn what became of it.

Importing this package imports no torch; using a name of it does.
Few files: everything is in rooms.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .packing import strip_wrappers, unfuse_experts
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
__getattr__, __dir__ = lazy(__name__, __all__, ".transfer", ".publish", ".packing")
