"""From a finished run to the message that is published."""

from __future__ import annotations

from ...messages.codec import Result
from ..engine import EngineInfo
from ..text import Tokenizer
from .task import Run, TaskRun


def as_result(run: Run, worker_id: str, info: EngineInfo, tokenizer: Tokenizer) -> Result:
    """What is published of `run`: with the text of a job that came as text, and the calls of one with tools."""
    if isinstance(run, TaskRun):
        return run.result(worker_id, info)
    text = None if run.job.token_ids is not None else run.text(tokenizer.decode)
    result = run.result(worker_id, info, text)
    if not run.job.tools:
        return result
    from ..text import calls_in  # noqa: PLC0415 – only where a job has tools

    calls = calls_in(tokenizer.decode(run.tokens, special=True), run.job, run.index)
    return result.model_copy(update={"tool_calls": calls}) if calls else result
