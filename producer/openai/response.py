"""Finished answers in OpenAI's form, with log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ...messages.model import GenerateJob, RolloutResult, Segment
from .request import Request

Decode = Callable[[Sequence[int]], str]
OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}


def response(
    request: Request, results: Sequence[Sequence[RolloutResult | None]], decode: Decode | None = None
) -> dict[str, Any]:
    """A chat.completion or text_completion.

    results: the samples of each of the request's jobs, in order. None is a sample that was aborted before it began.
    decode: ids to text without special tokens. Prompts of ids need it, because their results have no text.
        Log-probabilities show tokens as text with it, and as "token_id:<id>" without it.
    """
    choices = []
    for place, (job, samples) in enumerate(zip(request.jobs, results, strict=True)):
        for number, sample in enumerate(samples):
            choices.append(_choice(request, place * job.n + number, job, sample, decode))
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


def text_of(result: RolloutResult, decode: Decode | None) -> str:
    """The text of a sample. It is empty for a prompt of ids without `decode`."""
    if result.text is not None:
        return result.text
    return decode(result.token_ids.tolist()) if decode is not None else ""


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
    request: Request, index: int, job: GenerateJob, sample: RolloutResult | None, decode: Decode | None
) -> dict[str, Any]:
    text = text_of(sample, decode) if sample is not None else ""
    finish: str = sample.finish_reason if sample is not None else "abort"
    choice: dict[str, Any] = {"index": index}
    if request.kind == "chat":
        content, calls = request.tools.calls(sample, text) if sample is not None else (text, [])
        choice["message"] = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        finish = "tool_calls" if calls and finish == "stop" else finish
    else:
        choice["text"] = text
    choice["finish_reason"] = finish
    choice["stop_reason"] = stop_reason(sample) if sample is not None else None
    choice["logprobs"] = None
    if request.logprobs and sample is not None:
        tokens = Tokens.of(sample.token_ids, sample.logprobs, sample.token_arrays)
        made = chat_logprobs if request.kind == "chat" else completion_logprobs
        choice["logprobs"] = made(tokens, decode)
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


@dataclass(frozen=True, slots=True)
class Tokens:
    """Consecutive tokens. top: the likeliest (id, logprob) pairs at each position, if the request asked for them."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None = None

    @classmethod
    def of(cls, token_ids: Any, logprobs: Any, arrays: Any) -> Tokens:
        """From the arrays of a RolloutResult or a Delta."""
        ids = token_ids.tolist()
        top = None
        if "top_ids" in arrays:
            rows = zip(arrays["top_ids"].tolist(), arrays["top_logprobs"].tolist(), strict=True)
            top = [list(zip(names, values, strict=True)) for names, values in rows]
        return cls(ids, logprobs.tolist() if logprobs is not None else [0.0] * len(ids), top)


def chat_logprobs(tokens: Tokens, decode: Decode | None) -> dict[str, Any]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}, one entry for each token."""
    content = []
    for place, (token, logprob) in enumerate(zip(tokens.ids, tokens.logprobs, strict=True)):
        top = tokens.top[place] if tokens.top is not None else []
        content.append(_entry(token, logprob, decode) | {"top_logprobs": [_entry(*one, decode) for one in top]})
    return {"content": content}


def completion_logprobs(tokens: Tokens, decode: Decode | None, offset: int = 0) -> dict[str, Any]:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}. offset: characters of text before these tokens."""
    texts = [_token_text(token, decode) for token in tokens.ids]
    offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
    top = [{_token_text(token, decode): value for token, value in row} for row in tokens.top] if tokens.top else None
    return {"tokens": texts, "token_logprobs": tokens.logprobs, "top_logprobs": top, "text_offset": offsets}


def _token_text(token: int, decode: Decode | None) -> str:
    return decode([token]) if decode is not None else f"token_id:{token}"


def _entry(token: int, logprob: float, decode: Decode | None) -> dict[str, Any]:
    text = _token_text(token, decode)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
