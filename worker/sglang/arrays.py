"""What SGLang returns beside tokens and their logprobs, as the arrays that RolloutResult names."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import EngineError, RequestRefused
from ...messages.model import MAX_ARRAY_BYTES
from ..engine import EngineRequest

NO_TOKEN = -1
"""In "prompt_top_ids" of the first token, which nothing predicted."""
MASKED = -1e20
"""SGLang has -1e30 or less, by a temperature of 100 at most, where a token was impossible."""
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Of a model. dtype: what its hidden states are in, by torch's name. layers, experts: 0 without experts."""

    hidden: int = 0
    dtype: str = "float32"
    layers: int = 0
    experts: int = 0

    @property
    def state_dtype(self) -> np.dtype[Any]:
        """What hidden states travel as: bfloat16 as its bits, in uint16."""
        return np.dtype({"bfloat16": "uint16", "float16": "float16"}.get(self.dtype, "float32"))


def check_sizes(request: EngineRequest, shapes: Shapes) -> None:
    """Raises RequestRefused if an array would be larger than may travel."""
    wanted, most = request.wanted, request.sampling.max_new_tokens
    prompt = request.token_ids.size - request.generated
    logprobs = wanted.logprobs
    widths = {"logprobs.top": 4 * logprobs.top, "logprobs.token_ids": 4 * len(logprobs.token_ids)}
    sizes = [(name, rows, width) for name, width in widths.items() for rows in (most, prompt * logprobs.prompt)]
    if wanted.hidden_states == "all":
        sizes.append(("hidden_states", most, shapes.hidden * shapes.state_dtype.itemsize))
    if wanted.routed_experts:
        sizes.append(("routed_experts", max(most, prompt), 4 * shapes.layers * shapes.experts))
    for name, rows, width in sizes:
        if rows * width > MAX_ARRAY_BYTES:
            raise RequestRefused(
                f"{name}: {width} bytes for each of up to {rows} tokens; an array may have {MAX_ARRAY_BYTES} bytes"
            )


def token_rows(request: EngineRequest, state: Any, start: int, end: int) -> dict[str, Array]:
    """The logprobs asked for of tokens `start` to `end` of this leg. state: SGLang's of the request, or None."""
    logprobs, rows = request.wanted.logprobs, dict[str, Array]()
    if state is None or end <= start:
        return rows
    if logprobs.top:
        rows["top_ids"] = np.array(state.output_top_logprobs_idx[start:end], np.int32)
        rows["top_logprobs"] = _logprobs(state.output_top_logprobs_val[start:end])
    if logprobs.token_ids:
        rows["id_logprobs"] = _logprobs(state.output_token_ids_logprobs_val[start:end])
    return rows


def prompt_arrays(request: EngineRequest, state: Any) -> dict[str, Array]:
    """The logprobs asked for of the prompt's own tokens; not of those that earlier legs generated."""
    logprobs, count = request.wanted.logprobs, request.token_ids.size - request.generated
    if not (logprobs.prompt and request.wanted.prompt) or state is None or not state.input_token_logprobs_val:
        return {}
    known = [[value] for value in state.input_token_logprobs_val[1:count]]
    arrays = {"prompt_logprobs": _after_first(known, 1)[:, 0]}
    if logprobs.top:
        ids = [[NO_TOKEN] * logprobs.top, *state.input_top_logprobs_idx[1:count]]
        arrays["prompt_top_ids"] = np.array(ids, np.int32)
        arrays["prompt_top_logprobs"] = _after_first(state.input_top_logprobs_val[1:count], logprobs.top)
    if logprobs.token_ids:
        known = state.input_token_ids_logprobs_val[1:count]
        arrays["prompt_id_logprobs"] = _after_first(known, len(logprobs.token_ids))
    if len(arrays["prompt_logprobs"]) != count:
        raise EngineError(f"SGLang told {len(arrays['prompt_logprobs'])} logprobs of a prompt of {count} tokens")
    return arrays


def hidden_arrays(
    request: EngineRequest, found: Any, count: int, shapes: Shapes
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Rows for `count` tokens, and arrays of the whole. found: SGLang's states, of the last token or of each."""
    wanted = request.wanted.hidden_states
    if wanted == "none" or not count:
        return {}, {}
    if not found:
        raise EngineError(f"SGLang told no hidden states of {count} tokens")
    if wanted == "last":
        return {}, {"last_hidden_state": _packed(found, shapes)}
    if len(found) < count:
        raise EngineError(f"SGLang told {len(found)} hidden states of {count} tokens")
    return {"hidden_states": _packed(found[:count], shapes)}, {}


def expert_arrays(
    request: EngineRequest, found: Any, count: int, shapes: Shapes
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Rows for `count` tokens, and arrays of the whole. found: SGLang's, of every token that went through the model.

    That is all but the last: a generated token's row is of the forward pass that sampled it, so the first one has that
    of the prompt's last token.
    """
    if not request.wanted.routed_experts or not count:
        return {}, {}
    if found is None:
        raise EngineError(f"SGLang told no routed experts of {count} tokens")
    data = base64.b64decode(found) if isinstance(found, str) else np.asarray(found, np.int32).tobytes()
    table = np.frombuffer(data, "<i4").reshape(-1, shapes.layers, shapes.experts).astype(np.int32)
    before = request.token_ids.size - 1 if request.wanted.prompt else 0
    if len(table) < before + count:
        raise EngineError(f"SGLang told the experts of {len(table)} tokens, of {before + count} at least")
    arrays: dict[str, Array] = {}
    if request.wanted.prompt:
        arrays["prompt_routed_experts"] = table[: request.token_ids.size - request.generated]
    return {"routed_experts": table[before : before + count]}, arrays


def _packed(states: Sequence[Any], shapes: Shapes) -> Array:
    array = np.array(states, np.float32)
    if shapes.state_dtype == np.uint16:
        return (array.view(np.uint32) >> 16).astype(np.uint16)  # exact: they are bfloat16 numbers
    return array.astype(shapes.state_dtype)


def _logprobs(rows: Sequence[Any]) -> npt.NDArray[np.float32]:
    array = np.array(rows, np.float32)
    array[array < MASKED] = -np.inf
    return array


def _after_first(rows: Sequence[Any], width: int) -> npt.NDArray[np.float32]:
    return np.concatenate([np.full((1, width), np.nan, np.float32), _logprobs(rows).reshape(-1, width)])
