"""Replay: recorded samples are taken from a journal, generated or scored again, and compared token by token.

Few files: they are the common part; each kind of replay adds its own.
"""

from .recorded import Recorded, Span, Where, recorded
from .verdict import Limits, State, Verdict, compared, unverified

__all__ = ["Limits", "Recorded", "Span", "State", "Verdict", "Where", "compared", "recorded", "unverified"]
