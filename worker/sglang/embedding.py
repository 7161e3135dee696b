"""Embeddings and rewards on an SGLang engine that pools: one forward pass over each input."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import RequestRefused
from ..engine import TaskOutput, TaskRequest
from .answer import aborted, answer


async def pooled(manager: Any, request: TaskRequest) -> TaskOutput:
    """The embedding, cut and normalised as asked for, or the scores of `request`.

    Raises RequestRefused for more dimensions than the model has; ValueError where SGLang refuses.
    """
    from sglang.srt.managers import io_struct  # noqa: PLC0415  (seconds of imports; loaded by the engine's start)

    asked = io_struct.EmbeddingReqInput(rid=request.request_id, input_ids=request.token_ids.tolist())
    found = await answer(manager, asked)
    if aborted(found) or found is None or found.get("embedding") is None:
        return TaskOutput()
    values = np.asarray(found["embedding"], dtype=np.float32).reshape(-1)
    if request.task == "embed":
        values = shaped(values, request.dimensions, request.normalize)
    return TaskOutput(values, finished=True)


def shaped(values: npt.NDArray[np.float32], dimensions: int | None, normalize: bool) -> npt.NDArray[np.float32]:
    """The first `dimensions` components of (d,) float32, of length 1 if asked for; a zero vector stays one.

    Raises RequestRefused if there are fewer.
    """
    if dimensions is not None and dimensions > len(values):
        raise RequestRefused(f"dimensions={dimensions}: embeddings of this model have {len(values)}")
    values = values[:dimensions]
    length = float(np.linalg.norm(values.astype(np.float64)))
    return (values / length).astype(np.float32) if normalize and length > 0 else values
