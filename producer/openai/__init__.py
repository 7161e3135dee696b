"""OpenAI's chat completions and completions as jobs, and results as OpenAI's answers. It has no HTTP.

    request = chat_request(body, defaults)
    handles = await client.submit_many(request.jobs)
    answer = response(request, [await client.wait(handle) for handle in handles], decode)

`stream_chunks(request, deltas, decode)` answers a body with `stream`. `error_of` makes the answer for an error.
"""

from .chunks import GrowingText, stream_chunks
from .errors import error_of
from .logprobs import Tokens, bytes_reader
from .request import Request, chat_request, completion_request
from .response import response, version_spans

__all__ = [
    "GrowingText",
    "Request",
    "Tokens",
    "bytes_reader",
    "chat_request",
    "completion_request",
    "error_of",
    "response",
    "stream_chunks",
    "version_spans",
]
