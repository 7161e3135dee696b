"""Replay: recorded samples are taken from a journal, generated or scored again, and compared token by token."""

from .page import as_html
from .recorded import Recorded, Span, Where, recorded
from .report import Report
from .verdict import Limits, State, Verdict, compared, unverified

__all__ = [
    "Limits",
    "Recorded",
    "Report",
    "Span",
    "State",
    "Verdict",
    "Where",
    "as_html",
    "compared",
    "recorded",
    "unverified",
]
