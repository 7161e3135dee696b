"""vLLM's /inference/v1/generate and SkyRL's /skyrl/v1/generate: a chat whose prompt is token ids."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from ....messages.errors import InvalidField
from ....messages.model import RolloutResult
from ....producer.calls import Delta
from ....producer.openai import Request, log_once, prompt_logprobs
from ..call import Call
from ..door import Answered, Decode, Form, Kind, chunks_of

TAKEN = frozenset(
    {"model", "stream", "stream_options", "priority", "session_id", "weight_version", "enqueue", "deadline_s"}
    | {"timeout", "min_version", "exact_version", "max_staleness", "trace_id", "lora"}
)
"""Fields of a body that mean the same in a chat's."""
READ = frozenset(
    {"token_ids", "sampling_params", "request_id", "rid", "cache_salt", "output_mode", "return_token_ids"}
    | {"reasoning_ended", "kv_transfer_params"}
)
REFUSED = ("features", "content_parts")
SHOWN = {
    "return_token_ids": True, "return_tokens_as_token_ids": True, "return_weight_versions": True, "logprobs": False,
}  # fmt: skip
UNSAID = frozenset({"logprobs", "routed_experts_prompt_start", "skip_special_tokens", "output_kind", "detokenize"})
"""Of sampling parameters: what is said otherwise here, or about texts that no answer has."""


def read_generate(body: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """A body as one of OpenAI's chats. Raises InvalidField."""
    for name in REFUSED:
        if body.get(name):
            raise InvalidField(name, body[name], "absent: token ids only here; chats take media")
    for name in body.keys() - TAKEN - READ - {*REFUSED}:
        log_once(name, "it is not known here")
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise InvalidField("sampling_params", params, "an object")
    if body.get("output_mode") not in {None, "tokens"}:
        raise InvalidField("output_mode", body["output_mode"], "tokens")
    given = {name: body[name] for name in TAKEN & body.keys()} | SHOWN | {"input_ids": body.get("token_ids") or []}
    given |= {str(name): it for name, it in params.items() if name not in UNSAID and it is not None}
    if (count := params.get("logprobs")) is not None:
        if type(count) is not int and not isinstance(count, bool):
            raise InvalidField("logprobs", count, "a whole number")
        # One is what verifiers asks for, who reads the sampled token's alone: others cost the engine time.
        given |= {"logprobs": True} | ({"top_logprobs": count} if count > 1 else {})
    return "chat", given


def show_generate(answered: Answered) -> dict[str, Any]:
    """vLLM's GenerateResponse, with tokens as texts and as numbers: older and newer readers look for either."""
    answer, call = answered.openai(), answered.call
    samples = [sample for samples in answered.results for sample in samples]
    choices = [_choice(*both) for both in zip(answer["choices"], samples, strict=True)]
    shown: dict[str, Any] = {
        name: answer[name] for name in ("model", "created", "usage", "weight_version") if name in answer
    }
    shown |= {"request_id": call.key or answer["id"], "output_mode": "tokens", "choices": choices}
    first = samples[0] if samples else None
    shown["prompt_logprobs"] = None if first is None else prompt_logprobs(first)
    shown["prompt_token_ids"] = answer["prompt_token_ids"] if call.body.get("return_token_ids") is True else None
    return shown


def _choice(choice: dict[str, Any], sample: RolloutResult | None) -> dict[str, Any]:
    names = ("index", "finish_reason", "stop_reason", "token_ids", "logprobs", "weight_versions")
    shown = {name: choice.get(name) for name in names}
    for entry in (shown["logprobs"] or {}).get("content") or ():
        entry["top_logprobs"] = entry["top_logprobs"] or [
            {name: entry[name] for name in ("token", "token_id", "logprob", "bytes")}
        ]
    return shown | {"routed_experts": None if sample is None else _experts(sample)}


def _experts(sample: RolloutResult) -> dict[str, Any] | None:
    """The experts of all tokens but the last, as SkyRL and prime-rl read them: `data` is first, they look for it."""
    if (routed := sample.token_arrays.get("routed_experts")) is None:
        return None
    rows = np.concatenate([sample.arrays["prompt_routed_experts"][:-1], routed])
    return {"data": b64encode(rows.tobytes()).decode(), "shape": list(rows.shape), "dtype": str(rows.dtype)}


async def stream_generate(
    call: Call, request: Request, deltas: AsyncIterator[Delta], decode: Decode
) -> AsyncIterator[dict[str, Any]]:
    """The chunks, each with the tokens that are new."""
    async for chunk in chunks_of(call, request, deltas, decode):
        choices = [_choice(choice, None) for choice in chunk["choices"] if choice.get("token_ids") is not None]
        if choices or chunk.get("usage"):
            yield {name: it for name, it in chunk.items() if name not in {"object", "prompt_token_ids"}} | {
                "request_id": call.key or chunk["id"], "choices": choices,
            }  # fmt: skip


GENERATE = Form(read_generate, show_generate, stream_generate)
