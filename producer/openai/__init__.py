"""OpenAI's bodies as jobs, and results as OpenAI's answers: chats, completions, embeddings, models. It has no HTTP.

    request = chat_request(body, defaults)
    handles = await client.submit_many(request.jobs)
    answer = response(request, [await client.wait(handle) for handle in handles], decode)

`stream_chunks(request, deltas, decode)` answers a body with `stream`. `error_of` makes the answer for an error.
"""

from .chunks import GrowingText, stream_chunks
from .embeddings import embedding_job, embedding_response
from .errors import error_of
from .fields import log_once, switch
from .logprobs import Tokens, bytes_reader, prompt_logprobs
from .models import model_list
from .request import Render, Request, chat_request, completion_request
from .response import meta_info, not_begun, prompt_ids_of, response, text_of, version_spans, weight_versions
from .tokens import detokenize, tokenize

__all__ = [
    "GrowingText",
    "Render",
    "Request",
    "Tokens",
    "bytes_reader",
    "chat_request",
    "completion_request",
    "detokenize",
    "embedding_job",
    "embedding_response",
    "error_of",
    "log_once",
    "meta_info",
    "model_list",
    "not_begun",
    "prompt_ids_of",
    "prompt_logprobs",
    "response",
    "stream_chunks",
    "switch",
    "text_of",
    "tokenize",
    "version_spans",
    "weight_versions",
]
