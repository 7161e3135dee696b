"""The copy plan: what loading a checkpoint into an engine comes down to, recorded once and replayed."""

from .plan import Bound, CopyPlan
from .trace import PlanImpossible

__all__ = ["Bound", "CopyPlan", "PlanImpossible"]
