"""Finished answers in OpenAI's form, with what the readers of token ids, versions and log-probabilities look for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ...messages.ids import is_id
from ...messages.model import GenerateJob, RolloutResult, Segment
from ..calls import Delta
from .logprobs import Decode, TokenBytes, Tokens, chat_logprobs, completion_logprobs, prompt_logprobs
from .request import Request

OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
Samples = Sequence[RolloutResult | None]


def response(
    request: Request,
    results: Sequence[Samples],
    decode: Decode | None = None,
    token_bytes: TokenBytes | None = None,
) -> dict[str, Any]:
    """A chat.completion or text_completion.

    results: the samples of each of the request's jobs, in order. None is a sample that was aborted before it began.
    decode: ids to text without special tokens. Prompts of ids need it, because their results have no text.
        Log-probabilities show tokens as text with it, and as "token_id:<id>" without it. Its answers are kept.
    token_bytes: `bytes_reader` of the tokenizer. Without it, `bytes` of a token that is a part of a character is null.
    """
    choices, prompts, found = [], [], []
    for place, (job, samples) in enumerate(zip(request.jobs, results, strict=True)):
        prompts.append(prompt := prompt_ids_of(job, samples))
        for number, given in enumerate(samples):
            found.append(sample := given if given is not None else not_begun(job, number))
            choices.append(_choice(request, place * job.n + number, sample, decode, token_bytes, prompt=prompt))
    answer: dict[str, Any] = {
        "id": response_id(request),
        "object": OBJECTS[request.kind],
        "created": created(request),
        "model": request.model,
        "choices": choices,
        "usage": usage(request.jobs, results),
        "system_fingerprint": _fingerprint(found),
        **weight_versions([version for sample in found for version in sample.versions]),
    }
    if request.token_ids:
        answer["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else prompts
    return answer


def created(request: Request) -> int:
    """Unix time in seconds: as its jobs' ids say it, so that an answer which is asked for again is the same."""
    return int(request.jobs[0].id[:12], 16) // 1000 if is_id(request.jobs[0].id) else int(time.time())


def response_id(request: Request) -> str:
    """The id of an answer and of all its chunks."""
    return PREFIX[request.kind] + request.jobs[0].id


def usage(jobs: Sequence[GenerateJob], results: Sequence[Samples]) -> dict[str, Any]:
    """Token counts. The prompt of several samples counts once, and so does what was cached of it for all of them."""
    prompts = cached = 0
    for job, samples in zip(jobs, results, strict=True):
        prompts += len(ids := prompt_ids_of(job, samples))
        hits = (sample.cached_tokens for sample in samples if sample is not None)
        cached += min(len(ids), min(hits, default=0))
    generated = sum(sample.token_ids.size for samples in results for sample in samples if sample is not None)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": generated,
        "total_tokens": prompts + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def weight_versions(versions: Sequence[int]) -> dict[str, int]:
    """The oldest and the newest of the versions that sampled tokens of an answer. `weight_version` is the oldest."""
    if not versions:
        return {}
    oldest, newest = min(versions), max(versions)
    return {"weight_version": oldest, "weight_version_start": oldest, "weight_version_end": newest}


def text_of(request: Request, result: RolloutResult, decode: Decode | None) -> str:
    """The text of a sample, without the stop text that ended it. It is empty for a prompt of ids without `decode`."""
    text = result.text
    if text is None:
        text = decode(result.token_ids.tolist()) if decode is not None else ""
    return text[: stop_place(request, result, text)]


def stop_place(request: Request, result: RolloutResult, text: str) -> int | None:
    """Where the stop text begins that ended the sample and that the answer does not show. None if there is none."""
    if result.finish_reason != "stop" or result.matched_stop not in request.stops:
        return None
    # Before min_new_tokens a stop ends nothing, so then the last one did.
    find = text.rfind if request.jobs[0].sampling.min_new_tokens else text.find
    place = find(str(result.matched_stop))
    return place if place >= 0 else None


def version_spans(segments: Iterable[Segment], start: int = 0) -> list[dict[str, int]]:
    """The weights version of each token: [{"version", "start", "end"}], without gaps from `start` on."""
    spans = []
    for version, tokens in segments:
        spans.append({"version": version, "start": start, "end": start + tokens})
        start += tokens
    return spans


def ending(request: Request, result: RolloutResult, calls: bool) -> dict[str, Any]:
    """`finish_reason`, and `stop_reason` as in vLLM's servers: a token id, a text, or a list of ids, and "abort"."""
    finish, matched = result.finish_reason, result.matched_stop
    shown = {"abort": request.abort, "stop": request.tools.finish if calls else "stop"}.get(finish, finish)
    stop = "abort" if finish == "abort" else list(matched) if isinstance(matched, tuple) else matched
    return {"finish_reason": shown, "stop_reason": stop}


def token_fields(
    request: Request,
    source: RolloutResult | Delta,
    decode: Decode | None,
    token_bytes: TokenBytes | None,
    *,
    start: int = 0,
    offset: int = 0,
) -> dict[str, Any]:
    """The fields of a choice about its tokens, as the request asks for them.

    start, offset: tokens, and characters of text, of the sample before these.
    """
    fields: dict[str, Any] = {"logprobs": None}
    if request.logprobs and (source.token_ids.size or isinstance(source, RolloutResult)):
        tokens, plain = Tokens.of(source.token_ids, source.logprobs, source.token_arrays), request.ids_as_tokens
        if request.kind == "chat":
            fields["logprobs"] = chat_logprobs(tokens, decode, token_bytes, plain)
        else:
            fields["logprobs"] = completion_logprobs(tokens, decode, offset, plain)
    if request.token_ids:
        fields["token_ids"] = fields["response_token_ids"] = source.token_ids.tolist()
    if request.versions:
        fields["weight_versions"] = version_spans(source.segments, start)
    return fields


def prompt_fields(request: Request, ids: list[int]) -> dict[str, Any]:
    """The fields of a choice about its prompt."""
    return {"prompt_token_ids": ids} if request.token_ids or request.prompt_ids else {}


def _choice(
    request: Request,
    index: int,
    sample: RolloutResult,
    decode: Decode | None,
    token_bytes: TokenBytes | None,
    *,
    prompt: list[int],
) -> dict[str, Any]:
    text = text_of(request, sample, decode)
    tokens = Tokens.of(sample.token_ids, sample.logprobs, {})
    choice: dict[str, Any] = {"index": index}
    calls: list[dict[str, Any]] = []
    if request.kind == "chat":
        content, calls = request.tools.calls(sample, text)
        choice["message"] = {"role": "assistant", "content": content} | request.tools.shown(calls)
        if prompt and request.logprobs and request.ids_as_tokens:  # or NeMo-Gym tokenizes the conversation once more
            ids = {"prompt_token_ids": prompt, "generation_token_ids": tokens.ids}
            choice["message"] |= ids | {"generation_log_probs": tokens.logprobs}
    else:
        choice["text"] = text
    choice |= ending(request, sample, bool(calls)) | prompt_fields(request, prompt)
    if (scored := prompt_logprobs(sample)) is not None:
        choice["prompt_logprobs"] = scored
    if request.meta_info:
        choice["meta_info"] = meta_info(sample, len(prompt), tokens if request.logprobs else None)
    return choice | token_fields(request, sample, decode, token_bytes)


def not_begun(job: GenerateJob, number: int) -> RolloutResult:
    """What stands for a sample that was aborted before it began."""
    who = {"job_id": job.id, "sample": number, "n": job.n, "group_id": job.group, "worker_id": ""}
    return RolloutResult(**who, attempt=1, token_ids=np.zeros(0, np.int32), finish_reason="abort")


def meta_info(sample: RolloutResult, prompt: int, tokens: Tokens | None) -> dict[str, Any]:
    """SGLang's `meta_info` of one sample. tokens: with log-probabilities, if they are asked for."""
    info = {
        "id": sample.job_id,
        "finish_reason": {"type": sample.finish_reason, "matched": sample.matched_stop},
        "prompt_tokens": prompt,
        "completion_tokens": sample.token_ids.size,
        "cached_tokens": sample.cached_tokens,
        **weight_versions(sample.versions),
        "weight_versions": version_spans(sample.segments),
    }
    if "weight_version" in info:
        info["weight_version"] = str(info["weight_version"])  # as SGLang has it
    if tokens is not None:
        pairs = zip(tokens.logprobs, tokens.ids, strict=True)
        info["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
    return info


def _fingerprint(samples: Sequence[RolloutResult]) -> str | None:
    """OpenAI's name for what an answer was computed with: the same for the same engine, model, dtype and device."""
    known = next((sample.fingerprint for sample in samples if sample.fingerprint), None)
    return f"fp_{blake2b(repr(sorted(known.items())).encode(), digest_size=5).hexdigest()}" if known else None


def prompt_ids_of(job: GenerateJob, samples: Samples) -> list[int]:
    """The ids of a prompt. For a prompt of text a worker made them; [] if no sample has them."""
    if job.token_ids is not None:
        return list(job.token_ids.tolist())
    found = (sample.prompt_ids for sample in samples if sample is not None and sample.prompt_ids is not None)
    return next((list(ids.tolist()) for ids in found), [])
