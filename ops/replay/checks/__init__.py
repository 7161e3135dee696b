"""What recorded samples say without being generated again: scores, where a version broke, what a loss made of them."""

from .bisect import Bisected, Broken, bisect
from .follow import Follower
from .gaps import Gaps, Spread, gaps_of
from .loss import Losses, losses_of
from .properties import EACH, by_version, metric, replays, user_function, users
from .schedule import EVENTS, Schedule, schedule_of
from .score import Tolerance, score

__all__ = [
    "EACH",
    "EVENTS",
    "Bisected",
    "Broken",
    "Follower",
    "Gaps",
    "Losses",
    "Schedule",
    "Spread",
    "Tolerance",
    "bisect",
    "by_version",
    "gaps_of",
    "losses_of",
    "metric",
    "replays",
    "schedule_of",
    "score",
    "user_function",
    "users",
]
