"""Bodies of /tokenize and /detokenize, as vLLM's servers have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...messages.errors import InvalidField
from .fields import switch
from .logprobs import Decode
from .request import Render, chat_request, is_ids

Encode = Callable[[str, bool], Sequence[int]]
"""encode(text, add_special_tokens) -> ids."""


def tokenize(
    body: Mapping[str, Any],
    encode: Encode,
    render: Render,
    context_length: int,
    token_text: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """Answer a body of POST /tokenize: {"count", "max_model_len", "tokens", "token_strs"}.

    The body has a `prompt`, or `messages` with what else decides the prompt of a chat: the ids are those of the chat.
    token_text: what `return_token_strs` shows of a token. Raises InvalidField.
    """
    if body.get("messages") is None:
        if not isinstance(text := body.get("prompt"), str):
            raise InvalidField("prompt", text, "a text, or messages beside it")
        special = body.get("add_special_tokens") is None or switch(body, "add_special_tokens")
        ids = [int(token) for token in encode(text, special)]
    else:
        (job,) = chat_request(body, render=render, always_render=True).jobs
        ids = job.token_ids.tolist() if job.token_ids is not None else []
    shown = [token_text(token) for token in ids] if token_text and switch(body, "return_token_strs") else None
    return {"count": len(ids), "max_model_len": context_length, "tokens": ids, "token_strs": shown}


def detokenize(body: Mapping[str, Any], decode: Decode) -> dict[str, str]:
    """Answer a body of POST /detokenize, {"tokens"}: {"prompt"}. decode: keeps special tokens. Raises InvalidField."""
    ids: Any = body.get("tokens")
    if ids != [] and not (is_ids(ids) and min(ids) >= 0 and max(ids) < 1 << 31):
        raise InvalidField("tokens", ids, "a list of token ids, from 0 to 2**31 - 1")
    return {"prompt": decode(ids)}
