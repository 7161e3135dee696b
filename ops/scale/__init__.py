"""How many workers a pool needs, and a scaler of worker processes on one host.

Few files: the policy is what others use, and stands alone.
"""

from .policy import FULL, STATES, Decision, History, PoolView, ScaleSettings, State, decide

__all__ = ["FULL", "STATES", "Decision", "History", "PoolView", "ScaleSettings", "State", "decide"]
