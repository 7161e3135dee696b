"""Makes the result of each finished sample, and puts it where it is published from."""

from __future__ import annotations

from collections.abc import Callable

from ...messages.broker import Finished
from ...messages.codec import Result
from ...messages.errors import RequestRefused
from ..engine import Engine
from ..jobs import Run, SampleRun, as_result, text_with_calls
from ..text import Tokenizer, ToolReader
from .outbox import Outbox


class Results:
    """Makes the results of one worker. on_refused(sample, error): no result could be made of the sample."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        tools: ToolReader,
        outbox: Outbox,
        on_refused: Callable[[Run, RequestRefused], None],
    ) -> None:
        self._engine, self._tokenizer, self._tools = engine, tokenizer, tools
        self._outbox, self._on_refused = outbox, on_refused

    def make(self, sample: Run, worker_id: str) -> None:
        """Put the sample's result into the outbox: now, or as soon as its tool calls have been read."""
        result = as_result(sample, worker_id, self._engine.info, self._tokenizer)
        if isinstance(sample, SampleRun) and (text := text_with_calls(sample, self._tokenizer)) is not None:
            self._outbox.put_later(sample.job.id, self._with_calls(sample, result, text))
        else:
            self._outbox.put(Finished(sample.job.id, sample.attempt, sample.index, result))

    async def _with_calls(self, sample: SampleRun, result: Result, text: str) -> Finished | None:
        try:
            calls = await self._tools.calls_in(text, sample.job, sample.index)
            result = result.model_copy(update={"tool_calls": calls}) if calls else result
            return Finished(sample.job.id, sample.attempt, sample.index, result)
        except Exception as error:  # with its calls it may be larger than a message may be
            self._on_refused(sample, RequestRefused(f"unexpected {type(error).__name__}: {error}"))
            return None
