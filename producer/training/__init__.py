"""What a trainer needs beside a client: staleness under control, books that add up, groups by its rules, batches.

Many files: `feed` puts them together, and each of the others is one thing that it does, or that a loop uses alone.

`batch` and `ratios` are side doors: they import torch.
"""

from .asked import number_of
from .books import REASONS, Books, Measured, Prompt, Why
from .convert import to_skyrl, to_trl, to_verl
from .feed import RolloutFeed
from .groups import GroupRules, TrainGroup, rewards_differ
from .reproducible import seed_of
from .rows import Row, rows_of
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
    "Row",
    "Spread",
    "Staleness",
    "TrainGroup",
    "Why",
    "number_of",
    "rewards_differ",
    "rows_of",
    "seed_of",
    "to_skyrl",
    "to_trl",
    "to_verl",
]
