"""The parameters of every action that a worker can be asked for. Sender and worker both check them.

Each class is also a command of `rolloutmq control`, or a word of one: docstring and fields are its help and its flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..errors import InvalidField
from .base import Float, Int, Name, as_invalid_field

PauseMode = Literal["finish", "interrupt", "retract", "in_place", "abort"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")
ProfileActivity = Literal["CPU", "GPU", "MEM"]
Version = Annotated[Int, Field(ge=0, le=10**12 - 1)]


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise PydanticCustomError("path", "an absolute path: each worker looks for it on its own host")
    return path


def file_names(pattern: str) -> str:
    """The pattern, if it gives a file's name in one folder for each rank and part. Raises ValueError."""
    around = re.fullmatch(
        r"(\w[\w.-]*)?\{(rank|part)\}[\w.-]*[A-Za-z_.-][\w.-]*\{(rank|part)\}[\w.-]*\.safetensors", pattern
    )
    if around is None or around[2] == around[3]:
        raise PydanticCustomError(
            "pattern", "a file name with {rank} and {part}, apart from each other, that ends in .safetensors"
        )
    return pattern


Folder = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_absolute)]
"""An absolute path on the worker's host."""
FileNames = Annotated[str, Field(max_length=200), AfterValidator(file_names)]
Url = Annotated[str, Field(max_length=4096, pattern=r"^([a-z][a-z0-9+.-]*://.*)?$")]

_UPLOAD = "URL to copy the files to: file://, s3://, gs://, … (fsspec)."
_HAND_BACK = "Give what was running to other workers."


class Params(BaseModel):
    """Base of an action's parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoParams(Params):
    """Base of the actions that take no parameters."""


def _without(about: str) -> type[NoParams]:
    """The parameters of an action that takes none. about: its help."""
    return type("NoParams", (NoParams,), {"__doc__": about, "__module__": __name__})


class PauseParams(Params):
    """Stop generating until `resume`. Nothing new is claimed in any mode.

    finish: running samples run to their end. interrupt: they stop and keep what they have. retract: the same, and the
    memory of their KV and of cached prefixes goes back to the engine at once. in_place: the engine freezes with their
    KV and takes no weights until `resume`. abort: they end with what they have, and their clients get that.
    """

    mode: PauseMode = Field(default="interrupt", description="finish, interrupt, retract, in_place or abort.")
    hand_back: bool = Field(default=False, description=f"{_HAND_BACK} With interrupt and retract.")

    @field_validator("hand_back")
    @classmethod
    def _of_interrupted(cls, hand_back: bool, info: ValidationInfo) -> bool:
        if hand_back and info.data.get("mode") not in {"interrupt", "retract"}:
            raise PydanticCustomError("hand_back", "false, or mode 'interrupt' or 'retract'")
        return hand_back


class AbortParams(Params):
    """Cancel the jobs that workers hold; their clients are told. What is queued stays."""

    drop: bool = Field(default=True, description="Cancel the jobs, or only interrupt them: they continue at once.")


class StopParams(Params):
    """Drain workers and wait until they have left; unfinished jobs go back to the pool."""

    drain_s: Float | None = Field(
        default=None,
        ge=0,
        le=86400,
        description="Seconds that running samples have to end before the rest is handed back; default: the worker's.",
    )


class WakeParams(Params):
    """Take GPU memory again, all of it or by tag."""

    tags: tuple[MemoryTag, ...] = Field(
        default=(), max_length=3, description="weights, kv_cache or cuda_graph; repeatable. Default: all."
    )


class SleepParams(WakeParams):
    """Give up GPU memory, all of it or by tag."""

    hand_back: bool = Field(default=False, description=_HAND_BACK)


class SetVersionParams(Params):
    """Give the weights that workers have another number."""

    version: Version = Field(description="Above every number that the pool has given away.")


class AuditParams(Params):
    """Compare every bit of the engines' weights with the trainer's digests. Exit code 1 for any finding."""

    names: Int = Field(default=20, ge=1, le=10_000, description="At most so many tensors are named for each finding.")
    only: tuple[str, ...] = Field(
        default=(), max_length=10_000, description="Look at this parameter alone, by the engine's name; repeatable."
    )


class ParameterParams(Params):
    """Show the first values of a parameter of the engines' weights."""

    name: str = Field(min_length=1, max_length=512, description="As the engine calls it, or as the trainer sent it.")
    truncate_size: Int = Field(
        default=100, ge=1, le=1 << 17, description="So many entries of its first dimension; 1,048,576 values at most."
    )
    rank: Int = Field(default=0, ge=0, description="Tensor-parallel rank whose part of the parameter it is.")


class SaveParams(Params):
    """Write the served version to the worker's disk, and copy it to a URL."""

    path: Folder = Field(description="Absolute folder on the worker's host; the version gets a folder in it.")
    format: Literal["safetensors", "sharded"] = Field(
        default="safetensors",
        description="safetensors, in the trainer's names with digests; or sharded, SGLang's own, a part for each rank.",
    )
    upload: Url = Field(default="", description=_UPLOAD)
    pattern: FileNames | None = Field(
        default=None, description="Names of sharded files; default: model-rank-{rank}-part-{part}.safetensors."
    )
    max_size: Int | None = Field(
        default=None, ge=1 << 16, description="Most bytes in a file, 65536 or more; default: 5 GiB."
    )

    discard: bool = Field(default=False, description="The folder goes once it has been uploaded.")

    @field_validator("pattern")
    @classmethod
    def _of_sharded(cls, pattern: str | None, info: ValidationInfo) -> str | None:
        if pattern is not None and info.data.get("format") != "sharded":
            raise PydanticCustomError("pattern", "no pattern, or format 'sharded'")
        return pattern


class LoadParams(Params):
    """Serve weights from the workers' disks."""

    path: Folder = Field(description="Snapshot or checkpoint on the workers' hosts; absolute.")
    version: Version = Field(ge=1, description="The number it is served under, above all that the pool has.")
    format: Literal["auto", "snapshot", "safetensors", "sharded"] = Field(
        default="auto", description="auto (what is found there), snapshot, safetensors or sharded."
    )


class LoadAdapterParams(Params):
    """Load a LoRA adapter from the workers' disks."""

    name: Name = Field(description="What jobs call it.")
    version: Int = Field(ge=1, lt=1 << 40, description="Its version, at least 1.")
    path: Folder = Field(description="Absolute folder with PEFT's adapter_config.json and adapter_model.safetensors.")
    pinned: bool = Field(default=True, description="Keep it when a newer version of it comes.")


class UnloadAdapterParams(Params):
    """Take a LoRA adapter out of the engines."""

    name: Name = Field(description="What jobs call it.")
    version: Int | None = Field(default=None, ge=1, lt=1 << 40, description="Default: all of them.")


class StartProfileParams(Params):
    """Record what the engines do."""

    folder: Folder | None = Field(default=None, description="For traces, on the worker's host; default: a new one.")
    activities: tuple[ProfileActivity, ...] = Field(
        default=(), max_length=3, description="CPU, GPU or MEM; repeatable. Default: what the device has."
    )
    steps: Int | None = Field(default=None, ge=1, description="Stop by itself after so many forward passes.")


class StopProfileParams(Params):
    """End a profile; its files stay on the worker's host."""

    upload: Url = Field(default="", description=_UPLOAD)
    fetch_bytes: Int = Field(
        default=0, ge=0, le=8 << 20, description="So many bytes of traces come with the answer, whole files."
    )


class JournalParams(Params):
    """Have workers write a journal of what they do, from now on, or end it.

    It begins with what they hold. One that writes a journal elsewhere has to end that first.
    """

    switch: Literal["on", "off"] = Field(description="on or off.")
    folder: str = Field(
        default="",
        max_length=4096,
        validate_default=True,
        description="With on: absolute folder on the workers' hosts, or URL (s3://…); several workers may share one.",
    )

    @field_validator("folder")
    @classmethod
    def _only_with_on(cls, folder: str, info: ValidationInfo) -> str:
        if info.data.get("switch") == "off":
            if folder:
                raise PydanticCustomError("folder", "none with off: a worker has one journal at most")
            return folder
        return folder if "://" in folder else _absolute(folder)


ACTIONS: dict[str, type[Params]] = {
    "version": _without("Which version each worker serves, and in which state it is."),
    "adapters": _without("LoRA adapters of each worker."),
    "pause": PauseParams,
    "resume": _without("Continue after `pause`."),
    "abort": AbortParams,
    "stop": StopParams,
    "sleep": SleepParams,
    "wake": WakeParams,
    "flush_cache": _without("Forget cached prefixes. What runs is interrupted for it, and continues."),
    "clear_storage": _without("Empty the storage of a hierarchical cache."),
    "set_version": SetVersionParams,
    "audit": AuditParams,
    "parameter": ParameterParams,
    "save": SaveParams,
    "load": LoadParams,
    "load_adapter": LoadAdapterParams,
    "unload_adapter": UnloadAdapterParams,
    "start_profile": StartProfileParams,
    "stop_profile": StopProfileParams,
    "journal": JournalParams,
}


def check_params(action: str, params: Mapping[str, Any]) -> Params:
    """The parameters of an action. Raises InvalidField for an unknown action, and for what it does not take."""
    if action not in ACTIONS:
        raise InvalidField("action", action, f"one of {', '.join(ACTIONS)}")
    try:
        return ACTIONS[action].model_validate(dict(params))
    except ValidationError as error:
        raise as_invalid_field(error) from None
