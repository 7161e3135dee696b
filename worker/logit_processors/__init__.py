"""Logit processors that a job can ask for by name: the ones every worker has, and an operator's own.

They run in SGLang's scheduler process, on the logits of a batch's rows, after logit bias, penalties and grammars and
before temperature and truncation. This module imports no torch, because a worker checks jobs with it too.
"""

from .processor import LogitProcessor, Rows, tensor_on
from .registry import GROUP, Registry, known_processors

__all__ = ["GROUP", "LogitProcessor", "Registry", "Rows", "known_processors", "tensor_on"]
