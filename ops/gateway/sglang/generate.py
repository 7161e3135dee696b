"""SGLang's /generate: its bodies as OpenAI's completions, and results as its answers."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from ....messages.errors import InvalidField
from ....messages.model import RolloutResult
from ....producer.calls import Delta
from ....producer.openai import (
    GrowingText,
    Request,
    Tokens,
    log_once,
    meta_info,
    not_begun,
    prompt_ids_of,
    text_of,
    version_spans,
    weight_versions,
)
from ..call import Call
from ..door import Answered, Decode, Form, Kind

MAX_NEW_TOKENS = 128
"""SGLang's default."""
TAKEN = frozenset(
    {"model", "lora_path", "stream", "session_id", "weight_version", "seed", "enqueue", "deadline_s", "timeout"}
    | {"min_version", "exact_version", "max_staleness", "token_ids_logprob", "return_routed_experts"}
    | {"trace_id"}
)
"""Fields of a body that mean the same in ours."""
READ = frozenset(
    {"input_ids", "text", "sampling_params", "return_logprob", "top_logprobs_num", "logprob_start_len", "rid"}
    | {"priority", "request_id", "extra_key", "cache_salt", "routing_key", "log_metrics", "return_text_in_logprobs"}
    | {"custom_labels"}
)
REFUSED = frozenset(
    {"image_data", "video_data", "audio_data", "input_embeds", "session_params", "custom_logit_processor"}
    | {"return_sampling_mask", "return_indexer_topk", "return_hidden_states", "bootstrap_host"}
)
"""Fields without which the answer would be another one."""


def read_generate(body: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """A body of /generate as one of OpenAI's completions. Raises InvalidField."""
    for name in REFUSED & body.keys():
        if body[name]:
            raise InvalidField(name, body[name], "absent: /generate takes text and token ids here; chats take media")
    for name in body.keys() - TAKEN - READ - REFUSED:
        log_once(name, "it is not known here")
    if (body.get("input_ids") is None) == (body.get("text") is None):
        raise InvalidField("input_ids", body.get("input_ids"), "either input_ids or text")
    if not isinstance(body.get("input_ids"), list | None):
        raise InvalidField("input_ids", body["input_ids"], "a list of token ids, or of lists of them")
    params = _params(body.get("sampling_params"))
    given = {name: body[name] for name in TAKEN & body.keys()}
    given |= {"max_new_tokens": MAX_NEW_TOKENS} | params | ({"max_new_tokens": 1} if _only_scores(body) else {})
    given["prompt"] = body["text"] if body.get("input_ids") is None else body["input_ids"]
    if _flag(body, "return_logprob"):
        given["logprobs"] = _count(body, "top_logprobs_num")
        if _count(body, "logprob_start_len", -1) >= 0:
            given["logprob_start_len"] = 0
    if type(priority := body.get("priority")) is int:  # the highest goes first, at vLLM the lowest
        given["priority"] = -priority
    return "completion", given


def _params(given: Any) -> dict[str, Any]:
    params = given if isinstance(given, list) and given else [given or {}]
    if not all(isinstance(one, Mapping) for one in params) or any(one != params[0] for one in params):
        raise InvalidField("sampling_params", given, "an object, or the same one for each prompt")
    return {str(name): value for name, value in params[0].items() if value is not None}


def _only_scores(body: Mapping[str, Any]) -> bool:
    """Whether no token is asked for, as miles scores what it has. A job samples one, which is not shown then."""
    most = _params(body.get("sampling_params")).get("max_new_tokens")
    return type(most) is int and most == 0


def _alike(body: Mapping[str, Any], name: str) -> Any:
    """A field that may be a list with a value for each prompt."""
    value = body.get(name)
    if isinstance(value, list):
        if any(one != value[0] for one in value):
            raise InvalidField(name, value, "the same for each prompt")
        value = value[0] if value else None
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value := _alike(body, name) or False, bool):
        raise InvalidField(name, value, "true or false")
    return value


def _count(body: Mapping[str, Any], name: str, default: int = 0) -> int:
    if (value := _alike(body, name)) is None:
        return default
    if type(value) is not int:
        raise InvalidField(name, value, "a whole number")
    return value


def show_generate(answered: Answered) -> Any:
    """The answer: an object, or a list of them for several prompts or samples."""
    request, shown = answered.request, []
    for job, samples in zip(request.jobs, answered.results, strict=True):
        prompt = len(prompt_ids_of(job, samples))
        for number, given in enumerate(samples):
            sample = given if given is not None else not_begun(job, number)
            shown.append(_shown(answered.call, request, sample, prompt=prompt, decode=answered.decode))
    prompts = answered.call.body.get("input_ids") or answered.call.body.get("text")
    batch = isinstance(prompts, list) and not isinstance(prompts[0], int)
    return shown if batch or len(shown) > 1 else shown[0]


def _shown(call: Call, request: Request, sample: RolloutResult, *, prompt: int, decode: Decode) -> dict[str, Any]:
    tokens = Tokens.of(sample.token_ids, sample.logprobs, sample.token_arrays)
    info = meta_info(sample, prompt, tokens if request.logprobs else None)
    info |= {"id": call.key or sample.job_id, "finish_reason": _finish(sample)}
    if tokens.top is not None:
        info["output_top_logprobs"] = [[[value, token, None] for token, value in row] for row in tokens.top]
    if (own := sample.arrays.get("prompt_logprobs")) is not None and sample.prompt_ids is not None:
        start = max(0, _count(call.body, "logprob_start_len"))
        pairs = zip(own.tolist()[start:], sample.prompt_ids.tolist()[start:], strict=True)
        info["input_token_logprobs"] = [[value if np.isfinite(value) else None, it, None] for value, it in pairs]
    if (routed := sample.token_arrays.get("routed_experts")) is not None:
        before = sample.arrays["prompt_routed_experts"][:-1]  # the last one's are those of the first sampled token
        info["routed_experts"] = b64encode(np.concatenate([before, routed]).astype("<i4").tobytes()).decode()
    if sample.token_ids.size and _only_scores(call.body):
        none = {"completion_tokens": 0, "finish_reason": {"type": "length", "length": 0}, "output_token_logprobs": []}
        return {"text": "", "output_ids": [], "meta_info": info | none}
    return {"text": text_of(request, sample, decode[0]), "output_ids": tokens.ids, "meta_info": info}


def _finish(sample: RolloutResult) -> dict[str, Any]:
    count = sample.token_ids.size
    if sample.finish_reason == "abort":  # AReaL knows by these words that there is nothing to go on from
        return {"type": "abort", "message": "Aborted" if count else "Abort before prefill", "status_code": None}
    if sample.finish_reason == "length":
        return {"type": "length", "length": count}
    matched = sample.matched_stop
    return {"type": "stop", "matched": list(matched) if isinstance(matched, tuple) else matched}


class _Growing:
    """What a sample has so far. SGLang's streams say all of it each time."""

    def __init__(self, decode: Decode) -> None:
        self.text = GrowingText(decode[0]) if decode[0] is not None else None
        self.said, self.ids, self.logprobs = "", list[int](), list[list[Any]]()
        self.segments: list[Any] = []

    def add(self, delta: Delta) -> None:
        tokens = Tokens.of(delta.token_ids, delta.logprobs, {})
        self.ids += tokens.ids
        self.logprobs += [[value, token, None] for value, token in zip(tokens.logprobs, tokens.ids, strict=True)]
        self.segments += delta.segments
        if delta.text is not None:
            self.said += delta.text
        elif self.text is not None:
            self.text.add(tokens.ids)
            self.said = self.text.text

    def shown(self, key: str, prompt: int, logprobs: bool) -> dict[str, Any]:
        info: dict[str, Any] = {"id": key, "finish_reason": None, "prompt_tokens": prompt, "cached_tokens": 0}
        info |= {"completion_tokens": len(self.ids), "weight_versions": version_spans(self.segments)}
        info |= weight_versions([segment.version for segment in self.segments])
        if "weight_version" in info:
            info["weight_version"] = str(info["weight_version"])
        if logprobs:
            info["output_token_logprobs"] = list(self.logprobs)
        return {"text": self.said, "output_ids": list(self.ids), "meta_info": info}


async def stream_generate(
    call: Call, request: Request, deltas: AsyncIterator[Delta], decode: Decode
) -> AsyncIterator[dict[str, Any]]:
    """The data of a stream's events, each with all that its sample has so far."""
    jobs = {job.id: (place, job) for place, job in enumerate(request.jobs)}
    growing: dict[tuple[str, int], _Growing] = {}
    async for delta in deltas:
        place, job = jobs[delta.job_id]
        sample = growing.setdefault((job.id, delta.sample), _Growing(decode))
        prompt = prompt_ids_of(job, [delta.result])
        if delta.result is not None:
            shown = _shown(call, request, delta.result, prompt=len(prompt), decode=decode)
        else:
            sample.add(delta)
            shown = sample.shown(call.key or job.id, len(prompt), request.logprobs)
        yield shown | {"index": place * job.n + delta.sample}


GENERATE = Form(read_generate, show_generate, stream_generate)
