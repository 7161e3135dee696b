"""`rolloutmq dashboard` and `rolloutmq report`: a pool on a page, live or out of its journal, and a run's summary.

Many files: each is one view (ribbon, failures, rollouts, report) or one way of it (live, recorded, as a file).
"""

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .app import LIMITS, LOOPBACK, live_application, read_token, recorded_application
    from .export import as_page, page_of
    from .history import History, load
    from .report import Limits, report_of
    from .rollouts import Rollouts

__all__ = [
    "LIMITS",
    "LOOPBACK",
    "History",
    "Limits",
    "Rollouts",
    "as_page",
    "live_application",
    "load",
    "page_of",
    "read_token",
    "recorded_application",
    "report_of",
]
__getattr__, __dir__ = lazy(__name__, __all__, ".history", ".report", ".rollouts", ".export", ".app")
