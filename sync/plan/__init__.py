"""The copy plan: the copies that loading a checkpoint into an engine consists of, recorded once and replayed."""

from .plan import Bound, CopyPlan
from .trace import PlanImpossible

__all__ = ["Bound", "CopyPlan", "PlanImpossible"]
