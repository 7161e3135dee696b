"""Bodies of /v1/embeddings as jobs, and their answers."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from ...messages.errors import InvalidField
from ...messages.model import EmbedJob, EmbedResult
from .fields import model_of, queue_fields
from .request import prompts_of


def embedding_job(body: Mapping[str, Any]) -> EmbedJob:
    """Read a body of POST /v1/embeddings: input (a text, ids, or a list of either), dimensions, encoding_format.

    `normalize: false`, and a job's priority, deadline_s and versions, may be there, too. Raises InvalidField.
    """
    prompts = prompts_of("input", body.get("input"))
    (form,) = {name for prompt in prompts for name in prompt}
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise InvalidField("encoding_format", body["encoding_format"], "float or base64")
    fields = queue_fields(body) | {name: body[name] for name in ("dimensions", "normalize") if name in body}
    fields["texts" if form == "text" else form] = [prompt[form] for prompt in prompts]
    return EmbedJob.build(**{name: value for name, value in fields.items() if value is not None})


def embedding_response(body: Mapping[str, Any], results: Sequence[EmbedResult]) -> dict[str, Any]:
    """The answer to a body. results: one for each input, in order.

    Vectors are lists, or base64 of little-endian float32, as OpenAI's client asks for by itself.
    """
    vectors = [result.embedding.astype("<f4") for result in results]
    coded = body.get("encoding_format") == "base64"
    shown = [b64encode(vector.tobytes()).decode() if coded else vector.tolist() for vector in vectors]
    tokens = sum(result.tokens for result in results)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(shown)],
        "model": model_of(body),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
