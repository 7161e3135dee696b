"""Episodes: many turns between the model and an environment, with tools, as rows for a trainer."""

from .environment import Environment, Observation, Step
from .episode import Episode, Turn
from .limits import EpisodeLimits
from .run import run_episodes

__all__ = ["Environment", "Episode", "EpisodeLimits", "Observation", "Step", "Turn", "run_episodes"]
