"""One call of a running engine: what is refused, what SGLang is told, and what it answers."""

from .answer import Shapes, engine_output, generated_so_far, progress_of
from .request import check_request, grammar_refusal

__all__ = ["Shapes", "check_request", "engine_output", "generated_so_far", "grammar_refusal", "progress_of"]
