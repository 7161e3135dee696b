"""Finds where a sample ends: stop texts, regular expressions and token sequences."""

from .matcher import Match, StopMatcher, Stops, check_stops
from .pieces import Pieces, pieces_of

__all__ = ["Match", "Pieces", "StopMatcher", "Stops", "check_stops", "pieces_of"]
