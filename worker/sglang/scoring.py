"""Log-probabilities of given tokens on an SGLang engine that generates: a prefill, and nothing after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engine import TaskOutput, TaskRequest
from .answer import aborted, answer


async def scored(manager: Any, request: TaskRequest) -> TaskOutput:
    """Log-probabilities of the tokens from `request.start` on. Raises ValueError where SGLang refuses.

    What the prefix cache holds is used up to the last token before `start`: many continuations of one prompt cost one
    prefill of it.
    """
    from sglang.srt.managers import io_struct  # noqa: PLC0415  (seconds of imports; loaded by the engine's start)

    from . import compat as sglang_compat  # noqa: PLC0415

    asked = io_struct.GenerateReqInput(
        rid=request.request_id,
        input_ids=request.token_ids.tolist(),
        sampling_params={"max_new_tokens": 0, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=request.start - 1,  # SGLang has nothing to say about the first one it is asked for
        stream=False,
        extra_key=request.cache_key,
    )
    found = await answer(manager, asked)
    if aborted(found) or found is None:
        return TaskOutput()
    values = sglang_compat.input_logprobs(found)[1:]
    if len(values) != len(request.token_ids) - request.start:
        return TaskOutput()  # the engine died under it: whoever asked is told by the engine
    return TaskOutput(np.array(values, dtype=np.float32), finished=True)
