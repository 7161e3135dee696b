"""Episodes: many turns between the model and an environment, with tools, as rows for a trainer.

`run` keeps many episodes going, `player` plays one, and `asking` gets one answer of the model. `environment`, `episode`
and `limits` are what callers write and read; `recorded` is what others played. The rest are environments of other
libraries, and tools.
"""

from .adapters import GymnasiumEnvironment, SkyRLGymEnvironment, ToolEnvironment
from .calculator import Calculator
from .environment import Environment, Observation, Step
from .episode import Episode, Turn
from .limits import EpisodeLimits
from .python_tool import PythonTool
from .recorded import RecordedSession, take_session
from .run import run_episodes
from .search import Search

__all__ = [
    "Calculator",
    "Environment",
    "Episode",
    "EpisodeLimits",
    "GymnasiumEnvironment",
    "Observation",
    "PythonTool",
    "RecordedSession",
    "Search",
    "SkyRLGymEnvironment",
    "Step",
    "ToolEnvironment",
    "Turn",
    "run_episodes",
    "take_session",
]
