"""How many ways an engine is split, and which of them weight sync can follow.

A version is received by every scheduler process of an engine under its tensor-parallel rank (sglang_control.py). So
tensor parallelism works, and expert parallelism, which spreads experts over the same ranks. Pipeline stages, and the
replicas of SGLang's own data parallelism, use each of those ranks more than once.
"""

from __future__ import annotations

from ...messages.errors import InvalidField

PP_REASON = (
    "only 1: ranks of a version's transfer are tensor-parallel ranks, and every pipeline stage has each of them again; "
    "split the model by tp_size"
)
DP_REASON = (
    "only 1: every replica would have the same tensor-parallel ranks; what is data parallel is the pool: start a "
    "worker for each replica"
)


def check_parallelism(*, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> None:
    """Raises InvalidField, with the reason, for sizes that weight sync cannot follow or that do not fit together.

    tp: tensor-parallel size. pp: pipeline stages. dp: SGLang's data-parallel replicas inside one engine. ep: how many
    of the tensor-parallel ranks the experts of a layer are spread over; it divides tp.
    """
    for name, size in (("tp_size", tp), ("pp_size", pp), ("dp_size", dp), ("ep_size", ep)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidField(name, size, "a count, at least 1")
    if pp > 1:
        raise InvalidField("pp_size", pp, PP_REASON)
    if dp > 1:
        raise InvalidField("dp_size", dp, DP_REASON)
    if tp % ep:
        raise InvalidField("ep_size", ep, f"a divisor of tp_size={tp}: experts are spread over tensor-parallel ranks")
