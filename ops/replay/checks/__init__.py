"""What recorded samples say without being generated again: scores, where a version broke, what a loss made of them."""

from .bisect import Bisected, Broken, bisect
from .gaps import Gaps, Spread, gaps_of
from .score import Tolerance, score

__all__ = ["Bisected", "Broken", "Gaps", "Spread", "Tolerance", "bisect", "gaps_of", "score"]
