"""One call of a running engine: the check of the request, its form for SGLang, and SGLang's answer."""

from .answer import Shapes, engine_output, generated_so_far, progress_of
from .request import check_request, grammar_refusal

__all__ = ["Shapes", "check_request", "engine_output", "generated_so_far", "grammar_refusal", "progress_of"]
