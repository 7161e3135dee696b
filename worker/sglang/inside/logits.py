"""What a request tells the sampler in SGLang's scheduler process: its logit processors, which logprobs, which states.

Made here, read by :mod:`.sglang_sampler`. Most requests tell it nothing, and cost it nothing.
"""

from __future__ import annotations

from typing import Any

from ...engine import NOTHING_MORE, EngineRequest

PROCESSORS, SCALED, ALL_STATES = "processors", "scaled", "all_states"
"""[[name, params], ...] in the job's order; logprobs after temperature; a hidden state for each token."""


def told(request: EngineRequest) -> dict[str, Any]:
    """A part of the request's extras, for the scheduler's process."""
    wanted = request.wanted
    if wanted is NOTHING_MORE:
        return {}
    parts: dict[str, Any] = {}
    if wanted.logit_processors:
        parts[PROCESSORS] = [[each.name, each.params] for each in wanted.logit_processors]
    if wanted.logprobs.kind == "scaled" and request.sampling.temperature > 0:
        parts[SCALED] = True
    if wanted.hidden_states == "all":
        parts[ALL_STATES] = True
    return parts


def concerns(extras: dict[str, Any]) -> bool:
    """Whether these are for the sampler."""
    return not extras.keys().isdisjoint({PROCESSORS, SCALED, ALL_STATES})
