"""Replay: recorded samples are taken from a journal, generated or scored again, and compared token by token."""

from ..journal import Recorded, Span, Where, recorded
from .queued import generate_copies, waiting
from .report import report_of, summary
from .settings import Settings
from .tokens import regenerate, replay_tokens, replaying
from .verdict import BADNESS, Verdict, compared, tokens_of, unverified

__all__ = [
    "BADNESS",
    "Recorded",
    "Settings",
    "Span",
    "Verdict",
    "Where",
    "compared",
    "generate_copies",
    "recorded",
    "regenerate",
    "replay_tokens",
    "replaying",
    "report_of",
    "summary",
    "tokens_of",
    "unverified",
    "waiting",
]
