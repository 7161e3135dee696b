"""One request of each kind to SGLang, and its answer. Imports SGLang, which the engine's start has loaded."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.managers import io_struct
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from ....messages.errors import RequestRefused
from ...engine import EngineRequest, TaskOutput, TaskRequest
from .answer import INPUT_LOGPROBS
from .media import place_media
from .request import generate_arguments

ABORTED = "Aborted by AbortReq."
"""SGLang refuses a request with this text if it is aborted while its grammar is compiled."""


class Marker(CustomLogitProcessor):  # type: ignore[misc]
    """Marks a request whose extras are for the sampler (`inside/sampler.py`). It leaves logits as they are.

    SGLang keeps a request's custom parameters beside its row of the batch only if the request names a logit processor's
    class, in a serialised form.
    """

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """Return `logits` unchanged."""
        return logits


@cache
def marker() -> str:
    """Return Marker in SGLang's serialised form. It is made in this process, from nothing that a message brought."""
    text: str = Marker.to_str()
    return text


def generate_input(request: EngineRequest, *, deterministic: bool = False) -> Any:
    """Return the request as SGLang's GenerateReqInput."""
    return io_struct.GenerateReqInput(**generate_arguments(request, marker=marker, deterministic=deterministic))


async def generate(manager: Any, request: EngineRequest, *, deterministic: bool = False) -> dict[str, Any] | None:
    """Return SGLang's answer to a generation request, or None if it was aborted before it reached the scheduler.

    deterministic: the engine samples by seeds. Raises RequestRefused for media without places, and what SGLang raises:
    ValueError for a request that it refuses.
    """
    asked = generate_input(request, deterministic=deterministic)
    if request.media:
        for name, value in (await asyncio.to_thread(place_media, request, manager.mm_processor)).items():
            setattr(asked, name, value)
    return await _answer(manager, asked)


async def perform(manager: Any, request: TaskRequest) -> TaskOutput:
    """Return the result of an embedding, reward or score task. It is not finished if it was aborted.

    Raises RequestRefused for more dimensions than the model has, and ValueError if SGLang refuses the request.
    """
    return await (_score if request.task == "score" else _pool)(manager, request)


async def _pool(manager: Any, request: TaskRequest) -> TaskOutput:
    """Return the embedding, cut and normalised as asked for, or the scores: one forward pass on a pooling engine."""
    found = await _answer(
        manager, io_struct.EmbeddingReqInput(rid=request.request_id, input_ids=request.token_ids.tolist())
    )
    if found is None or _aborted(found) or found.get("embedding") is None:
        return TaskOutput()
    values = np.asarray(found["embedding"], dtype=np.float32).reshape(-1)
    if request.task == "embed":
        values = shaped(values, request.dimensions, request.normalize)
    return TaskOutput(values, finished=True)


def shaped(values: npt.NDArray[np.float32], dimensions: int | None, normalize: bool) -> npt.NDArray[np.float32]:
    """Return the first `dimensions` components of (d,) float32. normalize: scale to length 1, unless all are zero.

    Raises RequestRefused if there are fewer.
    """
    if dimensions is not None and dimensions > len(values):
        raise RequestRefused(f"dimensions={dimensions}: embeddings of this model have {len(values)}")
    values = values[:dimensions]
    length = float(np.linalg.norm(values.astype(np.float64)))
    return (values / length).astype(np.float32) if normalize and length > 0 else values


async def _score(manager: Any, request: TaskRequest) -> TaskOutput:
    """Return log-probabilities of the tokens from `request.start` on: a prefill on an engine that generates.

    The prefix cache is used up to the last token before `start`. So many continuations of one prompt cost one prefill.
    """
    found = await _answer(
        manager,
        io_struct.GenerateReqInput(
            rid=request.request_id,
            input_ids=request.token_ids.tolist(),
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=request.start - 1,  # SGLang gives no logprob of the first token that it is asked for
            stream=False,
            extra_key=request.cache_key,
        ),
    )
    if found is None or _aborted(found):
        return TaskOutput()
    values = found["meta_info"].get(INPUT_LOGPROBS, [])[1:]
    if len(values) != len(request.token_ids) - request.start:
        return TaskOutput()  # the engine died meanwhile: the caller learns of it from the engine
    return TaskOutput(np.array(values, dtype=np.float32), finished=True)


async def _answer(manager: Any, request: Any) -> dict[str, Any] | None:
    """Return SGLang's last answer to `request`, or None if it was aborted before it reached the scheduler.

    Raises what SGLang raises: ValueError for a request that it refuses.
    """
    last: dict[str, Any] | None = None
    try:
        # Read to its end, because only that releases the lock that a weight update waits for.
        async for item in manager.generate_request(request, None):
            last = item
    except ValueError as error:
        # Older releases raise the first; newer ones return an empty output.
        if type(error).__name__ == "RequestAbortedError" or str(error) == ABORTED:
            return None
        raise
    except asyncio.CancelledError:
        manager.abort_request(request.rid)
        raise
    return last


def _aborted(found: dict[str, Any]) -> bool:
    return (found["meta_info"].get("finish_reason") or {}).get("type") == "abort"
