"""An engine without a model whose every token can be predicted: for tests of everything around an engine.

Few files: `engine` has what every job needs, `ops` the states of an engine's memory, caches and weights.
"""

from .engine import ScriptedEngine

__all__ = ["ScriptedEngine"]
