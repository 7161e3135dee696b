"""Finished answers in OpenAI's form, with log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from ...messages.model import GenerateJob, RolloutResult, Segment
from .logprobs import Decode, TokenBytes, Tokens, chat_logprobs, completion_logprobs
from .request import Request

OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}


def response(
    request: Request,
    results: Sequence[Sequence[RolloutResult | None]],
    decode: Decode | None = None,
    token_bytes: TokenBytes | None = None,
) -> dict[str, Any]:
    """A chat.completion or text_completion.

    results: the samples of each of the request's jobs, in order. None is a sample that was aborted before it began.
    decode: ids to text without special tokens. Prompts of ids need it, because their results have no text.
        Log-probabilities show tokens as text with it, and as "token_id:<id>" without it.
    token_bytes: `bytes_reader` of the tokenizer. Without it, `bytes` of a token that is a part of a character is null.
    """
    choices = []
    for place, (job, samples) in enumerate(zip(request.jobs, results, strict=True)):
        for number, sample in enumerate(samples):
            choices.append(_choice(request, place * job.n + number, sample, decode, token_bytes))
    answer: dict[str, Any] = {
        "id": response_id(request),
        "object": OBJECTS[request.kind],
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
        "usage": usage(request.jobs, results),
    }
    if request.token_ids:
        prompts = [_prompt_ids(job, samples) for job, samples in zip(request.jobs, results, strict=True)]
        answer["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else prompts
    return answer


def response_id(request: Request) -> str:
    """The id of an answer and of all its chunks."""
    return PREFIX[request.kind] + request.jobs[0].id


def usage(jobs: Sequence[GenerateJob], results: Sequence[Sequence[RolloutResult | None]]) -> dict[str, int]:
    """Token counts. The prompt of several samples counts once."""
    prompts = sum(len(_prompt_ids(job, samples)) for job, samples in zip(jobs, results, strict=True))
    generated = sum(sample.token_ids.size for samples in results for sample in samples if sample is not None)
    return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


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


def stop_reason(result: RolloutResult) -> Any:
    """The stop that ended the sample, in the form of vLLM's servers: a token id, a text, or a list of ids."""
    return list(result.matched_stop) if isinstance(result.matched_stop, tuple) else result.matched_stop


def _choice(
    request: Request,
    index: int,
    sample: RolloutResult | None,
    decode: Decode | None,
    token_bytes: TokenBytes | None,
) -> dict[str, Any]:
    text = text_of(request, sample, decode) if sample is not None else ""
    finish: str = sample.finish_reason if sample is not None else "abort"
    choice: dict[str, Any] = {"index": index}
    if request.kind == "chat":
        content, calls = request.tools.calls(sample, text) if sample is not None else (text, [])
        choice["message"] = {"role": "assistant", "content": content} | request.tools.shown(calls)
        finish = request.tools.finish if calls and finish == "stop" else finish
    else:
        choice["text"] = text
    choice["finish_reason"] = finish
    choice["stop_reason"] = stop_reason(sample) if sample is not None else None
    choice["logprobs"] = None
    if request.logprobs and sample is not None:
        tokens = Tokens.of(sample.token_ids, sample.logprobs, sample.token_arrays)
        chat = request.kind == "chat"
        choice["logprobs"] = chat_logprobs(tokens, decode, token_bytes) if chat else completion_logprobs(tokens, decode)
    if request.token_ids:
        choice["token_ids"] = sample.token_ids.tolist() if sample is not None else []
    if request.versions:
        choice["weight_versions"] = version_spans(sample.segments if sample is not None else ())
    return choice


def _prompt_ids(job: GenerateJob, samples: Sequence[RolloutResult | None]) -> list[int]:
    """The ids of a prompt. For a prompt of text a worker made them; [] if no sample has them."""
    if job.token_ids is not None:
        return list(job.token_ids.tolist())
    found = (sample.prompt_ids for sample in samples if sample is not None and sample.prompt_ids is not None)
    return next((list(ids.tolist()) for ids in found), [])
