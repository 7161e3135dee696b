"""Log-probabilities in OpenAI's two forms: of chats, and of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...messages.model import RolloutResult

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A run of tokens: ids, the log-probability of each, and, if they were asked for, the likeliest (id, logprob)s."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None = None

    @classmethod
    def of(cls, token_ids: Any, logprobs: Any, arrays: Any) -> Tokens:
        """Of arrays as RolloutResult and Delta have them."""
        ids = token_ids.tolist()
        top = None
        if "top_ids" in arrays:
            rows = zip(arrays["top_ids"].tolist(), arrays["top_logprobs"].tolist(), strict=True)
            top = [list(zip(names, values, strict=True)) for names, values in rows]
        return cls(ids, logprobs.tolist() if logprobs is not None else [0.0] * len(ids), top)

    @classmethod
    def of_result(cls, result: RolloutResult) -> Tokens:
        """All tokens of a sample."""
        return cls.of(result.token_ids, result.logprobs, result.token_arrays)


def chat_logprobs(tokens: Tokens, decode: Decode | None) -> dict[str, Any]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}, one entry for each token."""
    content = []
    for place, (token, logprob) in enumerate(zip(tokens.ids, tokens.logprobs, strict=True)):
        top = tokens.top[place] if tokens.top is not None else []
        content.append(_entry(token, logprob, decode) | {"top_logprobs": [_entry(*one, decode) for one in top]})
    return {"content": content}


def completion_logprobs(tokens: Tokens, decode: Decode | None, offset: int = 0) -> dict[str, Any]:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}. offset: characters of the text before these."""
    texts = [_text(token, decode) for token in tokens.ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [{_text(token, decode): logprob for token, logprob in row} for row in tokens.top] if tokens.top else None
    return {"tokens": texts, "token_logprobs": tokens.logprobs, "top_logprobs": top, "text_offset": offsets}


def _text(token: int, decode: Decode | None) -> str:
    return decode([token]) if decode is not None else f"token_id:{token}"


def _entry(token: int, logprob: float, decode: Decode | None) -> dict[str, Any]:
    text = _text(token, decode)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
