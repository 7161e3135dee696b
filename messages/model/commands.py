"""Commands to workers, and each worker's answer. `broker.command_channel` is how both travel."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from .base import Float, Message, PlainObject

MAX_TIMEOUT_S = 86400.0

ActionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
CommandId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Command(Message):
    """Something to do for one worker, or for all that are alive when `worker_id` is empty.

    params: plain data, see `command_params`. timeout_s: seconds from the sending on; a worker begins the command
        within them, and the sender waits for answers as long. The key of the answers follows from the id.
    sender: user and host, for people.
    """

    KIND: ClassVar[int] = 20

    id: CommandId
    action: ActionName
    worker_id: str = Field(default="", max_length=256)
    params: PlainObject = Field(default_factory=dict, max_length=64)
    timeout_s: Float = Field(gt=0, le=MAX_TIMEOUT_S)
    sender: str = Field(default="", max_length=128)


class CommandReply(Message):
    """One worker's answer.

    result: plain data, if the action was done. kind, error: else the name of the error, and its text.
    """

    KIND: ClassVar[int] = 21

    id: CommandId
    worker_id: str
    ok: bool
    result: PlainObject = Field(default_factory=dict)
    kind: str = Field(default="", max_length=64)
    error: str = Field(default="", max_length=8192)
