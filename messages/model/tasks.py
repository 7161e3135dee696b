"""Jobs that generate nothing: each of their inputs is one sample, so that all the queue promises holds for them too."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .base import Message
from .chat import ChatMessage
from .jobs import MAX_METADATA_ITEMS, MAX_SAMPLES, Metadata, Priority
from .results import Timings
from .submitted import Submitted

Conversation = Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=4096)]


class TaskJob(Submitted):
    """What all of them have. The fields mean what they mean in GenerateJob.

    task: which kind of worker can do it: EngineInfo.features has "task:<task>".
    n: how many inputs there are; counted, not given.
    """

    task: ClassVar[Literal["embed", "reward", "score"]]

    id: str = ""
    reply_to: str = Field(default="", max_length=128)
    group_id: str = Field(default="", max_length=128)
    priority: Priority = "normal"
    deadline_s: float | None = Field(default=None, gt=0, le=30 * 86400.0)
    min_version: int = Field(default=0, ge=0)
    max_staleness: int | None = Field(default=None, ge=0)
    trace_id: str | None = Field(default=None, max_length=64)
    metadata: Metadata = Field(default_factory=dict, max_length=MAX_METADATA_ITEMS)

    lora: ClassVar[None] = None
    min_adapter_version: ClassVar[int] = 0

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"{self.n} inputs: from 1 to {MAX_SAMPLES} in one job")
        return self

    @property
    def n(self) -> int:
        """Its inputs, each of which is one sample with one result."""
        raise NotImplementedError

    @property
    def group(self) -> str:
        """The group this job belongs to."""
        return self.group_id or self.id

    def features_used(self) -> list[str]:
        """What an engine must have for it, as in GenerateJob."""
        return [f"task:{self.task}"]

    def unsupported(self, features: frozenset[str]) -> list[str]:
        """Those of them that an engine with `features` does not have."""
        return [name for name in self.features_used() if name not in features]

    def value_of(self, name: str) -> Any:
        """What to show of it in an error about feature `name`."""
        return f"{type(self).__name__} of {self.n}"


class TaskResult(Message):
    """What came of one input of a TaskJob.

    sample: the input's number. n: how many the job has.
    version: of the weights it was computed with, all of it.
    tokens: of the input. The other fields are as in RolloutResult.
    """

    ok: ClassVar[bool] = True

    job_id: str
    sample: int = Field(ge=0)
    n: int = Field(ge=1)
    group_id: str
    version: int = Field(ge=0)
    tokens: int = Field(ge=0)
    worker_id: str
    attempt: int = Field(ge=1)
    timings: Timings = Timings()
    fingerprint: dict[str, str] = Field(default_factory=dict, max_length=32)
    metadata: Metadata = Field(default_factory=dict)
    trace_id: str | None = None
