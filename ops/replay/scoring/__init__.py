"""The train–inference check: recorded log-probabilities against those of a plain forward pass of the same weights."""

from .gaps import Gaps, Spread, gaps_of
from .score import PathOf, Tolerance, score

__all__ = ["Gaps", "PathOf", "Spread", "Tolerance", "gaps_of", "score"]
