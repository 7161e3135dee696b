"""OpenAI's bodies as jobs, and results as OpenAI's answers: chats, completions, embeddings, models. It has no HTTP.

    request = chat_request(body, defaults)
    handles = await client.submit_many(request.jobs)
    answer = response(request, [await client.wait(handle) for handle in handles], decode)

`stream_chunks(request, deltas, decode)` answers a body with `stream`. `error_of` makes the answer for an error.
"""

from .chunks import GrowingText, stream_chunks
from .embeddings import embedding_job, embedding_response
from .errors import error_of
from .fields import switch
from .logprobs import Tokens, bytes_reader
from .models import model_list
from .request import Render, Request, chat_request, completion_request
from .response import response, version_spans
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
    "model_list",
    "response",
    "stream_chunks",
    "switch",
    "tokenize",
    "version_spans",
]
