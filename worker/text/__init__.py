"""Text at the worker: tokenizers, chat templates, tool calls, and text that is still being generated."""

from .chat import after_context
from .stream import SampleStream
from .tokenizer import ModelTokenizer, NoTokenizer, Tokenizer
from .tool_calls import check_parser
from .tool_process import ToolReader

__all__ = ["ModelTokenizer", "NoTokenizer", "SampleStream", "Tokenizer", "ToolReader", "after_context", "check_parser"]
