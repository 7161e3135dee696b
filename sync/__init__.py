"""Weight sync, as a trainer uses it: publish a version, and get a report of what became of it.

Importing this package imports no torch. Using one of its names does.
Few files: everything is in rooms. A version goes through them in this order: `packing` copies it, `publish` sends it
(in rounds of `transfer`, over `wire`), `receive` gets, checks and loads it.
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
