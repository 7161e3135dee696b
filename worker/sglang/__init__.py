"""The engine protocol on SGLang: the half that runs in the worker's process. `inside` is the other half.

:mod:`.engine` is a door of its own, because importing it takes torch.
"""

from .config import DP_REASON, OWNED_ARGUMENTS, PP_REASON, SGLangConfig, check_extra, check_parallelism

__all__ = [
    "DP_REASON",
    "OWNED_ARGUMENTS",
    "PP_REASON",
    "SGLangConfig",
    "check_extra",
    "check_parallelism",
]
