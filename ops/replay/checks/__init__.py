"""What recorded samples say without being generated again: scores, where a version broke, what a loss made of them."""

from .bisect import Bisected, Broken, bisect
from .diff import Diff, diff
from .follow import Follower
from .gaps import Gaps, gaps_of
from .loss import Losses, losses_of
from .properties import by_version, metric, replays, users
from .schedule import EVENTS, Schedule, schedule_of
from .score import score

__all__ = [
    "EVENTS",
    "Bisected",
    "Broken",
    "Diff",
    "Follower",
    "Gaps",
    "Losses",
    "Schedule",
    "bisect",
    "by_version",
    "diff",
    "gaps_of",
    "losses_of",
    "metric",
    "replays",
    "schedule_of",
    "score",
    "users",
]
