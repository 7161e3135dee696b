"""Replay: recorded samples are taken from a journal, generated or scored again, and compared token by token."""

from .depths import DEPTHS, Depth
from .page import as_html
from .queued import generate_copies, waiting
from .recorded import Recorded, Span, Where, recorded
from .report import Report
from .settings import Settings
from .tokens import engine_for, engine_settings, regenerate, replay_tokens
from .told import as_data, as_line, summary, worst_of
from .verdict import Limits, State, Verdict, compared, unverified
from .weights import Weights

__all__ = [
    "DEPTHS",
    "Depth",
    "Limits",
    "Recorded",
    "Report",
    "Settings",
    "Span",
    "State",
    "Verdict",
    "Weights",
    "Where",
    "as_data",
    "as_html",
    "as_line",
    "compared",
    "engine_for",
    "engine_settings",
    "generate_copies",
    "recorded",
    "regenerate",
    "replay_tokens",
    "summary",
    "unverified",
    "waiting",
    "worst_of",
]
