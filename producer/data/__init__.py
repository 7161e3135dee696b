"""A job's inputs and outputs as data: media, decoding, tools, masks."""

from .decode import Decoder
from .either import as_error, call_either, told
from .masks import Turn, loss_mask, prompt_tokens, response_mask, scatter, turn_masks, turn_numbers
from .media import chat_job, from_openai, medium
from .texts import Texts
from .tool_class import ToolAnswer, ToolClass
from .tool_files import read_tool
from .tools import ToolLimits, ToolOutcome, ToolRegistry, run_tool_calls

__all__ = [
    "Decoder",
    "Texts",
    "ToolAnswer",
    "ToolClass",
    "ToolLimits",
    "ToolOutcome",
    "ToolRegistry",
    "Turn",
    "as_error",
    "call_either",
    "chat_job",
    "from_openai",
    "loss_mask",
    "medium",
    "prompt_tokens",
    "read_tool",
    "response_mask",
    "run_tool_calls",
    "scatter",
    "told",
    "turn_masks",
    "turn_numbers",
]
