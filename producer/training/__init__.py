"""What a trainer needs beside a client: staleness under control, books that add up, and groups by its own rules."""

from .books import REASONS, Books, Measured, Prompt, Why
from .feed import RolloutFeed
from .groups import GroupRules, TrainGroup, rewards_differ
from .spread import Spread
from .staleness import OnStale, Staleness

__all__ = [
    "REASONS",
    "Books",
    "GroupRules",
    "Measured",
    "OnStale",
    "Prompt",
    "RolloutFeed",
    "Spread",
    "Staleness",
    "TrainGroup",
    "Why",
    "rewards_differ",
]
