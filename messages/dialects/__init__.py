"""Sampling parameters in the names of SGLang, vLLM, SkyRL, verl and OpenAI, translated into a job's fields."""

from .names import NESTED, RULES, Dialect, Rule
from .readers import logprob_kind
from .translate import Fate, collect, job_fields, sampling_from

__all__ = ["NESTED", "RULES", "Dialect", "Fate", "Rule", "collect", "job_fields", "logprob_kind", "sampling_from"]
