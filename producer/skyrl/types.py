"""What goes in and out of the engine: the dictionaries of SkyRL's InferenceEngineInterface, key by key."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NotRequired, TypedDict

Conversation = list[dict[str, Any]]
"""Turns of `role` and `content`."""


class InferenceEngineInput(TypedDict, total=False):
    """A batch of prompts; exactly one of `prompts` and `prompt_token_ids`.

    prompts: conversations. prompt_token_ids: token ids, which are passed on as they are.
    sampling_params: in any dialect (SkyRL, vLLM, VERL, SGLang), `n` and `logprobs` among them; they take the place of
        the engine's own.
    session_ids: one per prompt; prompts of one id go to the worker that has the prefix, where that can be.
    return_hidden_states, return_routed_experts: see InferenceEngineOutput.
    image_data, video_data, audio_data: one entry per prompt: text (path, URL, base64), bytes, a PIL image, a list of
        these, or None.
    """

    prompts: list[Conversation] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None
    session_ids: list[Hashable] | None
    return_hidden_states: bool | None
    return_routed_experts: bool | None
    image_data: list[Any] | None
    video_data: list[Any] | None
    audio_data: list[Any] | None


class VersionSpan(TypedDict):
    """Tokens `start` to `end` (not included) of a sample were sampled with `version`; named as SGLang names them."""

    version: str
    start: int
    end: int


class InferenceEngineOutput(TypedDict):
    """Samples in the order of the prompts; with n > 1 the n of the first prompt, then those of the second, …

    responses: tokenizer.decode(ids, skip_special_tokens=True). response_ids: what was generated, and with what stopped
        it unless the parameters leave that off.
    stop_reasons: "stop", "length" or "abort".
    response_logprobs: of the sampled tokens; None unless `logprobs` was asked for.
    weight_version: the version of every token, or the newest one if there are several; None if there are no tokens.
    weight_versions: beyond SkyRL: which tokens have which version, for each sample. The spans have no gaps.
    n_per_prompt: n if it is more than 1, else None.
    request_ids: one per sample.
    hidden_states: (t, h) float arrays, one per sample, of the forward passes that sampled the tokens.
    routed_experts: flat int32 arrays of t * layers * k expert numbers, one per sample.
    """

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None
    weight_version: str | None
    weight_versions: list[list[VersionSpan]]
    n_per_prompt: int | None
    request_ids: list[str] | None
    hidden_states: list[Any] | None
    routed_experts: list[Any] | None


class StreamingChunk(TypedDict):
    """A run of tokens of one sample, `index` in the order of InferenceEngineOutput.

    delta_text: what they add to the text. delta_token_id: the last of them, None if there is none.
    delta_logprob: of that token, None unless asked for. cumulative_text, cumulative_token_ids: all so far.
    delta_token_ids, delta_logprobs: beyond SkyRL: all tokens of the run, and their log-probabilities.
    """

    index: int
    delta_text: str
    delta_token_id: int | None
    delta_logprob: float | None
    is_finished: bool
    stop_reason: str | None
    cumulative_text: str
    cumulative_token_ids: list[int]
    delta_token_ids: list[int]
    delta_logprobs: list[float] | None


class NamedWeightsUpdateRequest(TypedDict):
    """Tensors of one version, some or all; see docs/skyrl.md for the three ways they can come.

    names: as the model's checkpoint has them. dtypes: "bfloat16", "torch.bfloat16". shapes: one for each.
    sizes: elements of each, with `packed`. extras: one entry per tensor (one in all with `packed`):
        {"ipc_handles": {GPU's UUID: (function, arguments)}} as torch's reduce_tensor makes them.
    packed: all tensors are one after the other in the one of the only handle.
    tensors: beyond SkyRL: the tensors themselves.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sizes: NotRequired[list[int]]
    extras: NotRequired[list[dict[str, Any]] | None]
    packed: NotRequired[bool]
    tensors: NotRequired[list[Any]]


def group_outputs_by_prompt(output: InferenceEngineOutput) -> list[InferenceEngineOutput]:
    """One output per prompt, each with all of its samples; none of them has `n_per_prompt` unless it is more than 1."""
    n = output.get("n_per_prompt") or 1
    count = len(output["response_ids"])
    groups: list[InferenceEngineOutput] = []
    for start in range(0, count, n):
        part: dict[str, Any] = {
            key: value[start : start + n] if isinstance(value, list) else value for key, value in output.items()
        }
        part["weight_version"] = newest_version(part["weight_versions"]) if "weight_versions" in part else None
        groups.append(part)  # type: ignore[arg-type]
    return groups


def newest_version(spans: list[list[VersionSpan]]) -> str | None:
    """The newest version among the samples' tokens, None without tokens; versions are numbers as text."""
    found = [int(span["version"]) for sample in spans for span in sample]
    return str(max(found)) if found else None
