"""Text at the worker: tokenizers, chat templates, tool calls, and text that is still being generated."""

from .chat import after_context
from .stream import SampleStream
from .tokenizer import ModelTokenizer, NoTokenizer, Tokenizer
from .tool_calls import calls_in, check_parser

__all__ = ["ModelTokenizer", "NoTokenizer", "SampleStream", "Tokenizer", "after_context", "calls_in", "check_parser"]
