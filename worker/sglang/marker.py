"""What a request carries that told the sampler something (:mod:`.sglang_logits`).

SGLang keeps a request's custom parameters beside its row of the batch only if the request names a class of a logit
processor, in a serialised form. This class does nothing; :mod:`.sglang_sampler` does. Imports SGLang.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class Told(CustomLogitProcessor):  # type: ignore[misc]
    """Leaves logits as they are."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """See SGLang's."""
        return logits


@cache
def marker() -> str:
    """The class's name in SGLang's form: made in this process, of nothing that a message brought."""
    text: str = Told.to_str()
    return text
