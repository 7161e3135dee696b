"""How many workers a pool needs, and a scaler of worker processes on one host.

Few files: the policy is what others use, and stands alone.
"""

from .policy import STATES, Decision, History, PoolView, ScaleSettings, State, decide

__all__ = ["STATES", "Decision", "History", "PoolView", "ScaleSettings", "State", "decide"]
