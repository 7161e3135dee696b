"""An engine without a model whose every token can be predicted: for tests of everything around an engine."""

from .engine import ScriptedEngine

__all__ = ["ScriptedEngine"]
