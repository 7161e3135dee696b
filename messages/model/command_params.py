"""What can be asked of a worker: the parameters of every action, checked by who sends them and by who does them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InvalidField
from .base import Name, as_invalid_field

PauseMode = Literal["finish", "abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")
ProfileActivity = Literal["CPU", "GPU", "MEM"]
Version = Annotated[int, Field(ge=0, le=10**12 - 1)]
Folder = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^/")]
"""An absolute path on the worker's host."""
Url = Annotated[str, Field(max_length=4096, pattern=r"^([a-z][a-z0-9+.-]*://.*)?$")]


class Params(BaseModel):
    """Of one action."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoParams(Params):
    """There are none."""


class PauseParams(Params):
    """mode: what becomes of samples that run; nothing new is claimed in any of them.

    "finish": they go on to their end. "abort": they stop, keep what they have, and go on after `resume`. "retract":
    so, and the memory of their KV and of cached prefixes is given back to the engine at once. "in_place": the engine
    freezes with their KV, and goes on with it; until then it takes no weights.
    hand_back: what has stopped is given to the pool's other workers; not with "finish" and "in_place".
    """

    mode: PauseMode = "abort"
    hand_back: bool = False


class AbortParams(Params):
    """drop: the jobs this worker holds are cancelled, and their clients told; else what runs is interrupted, and goes
    on at once from what it has."""

    drop: bool = True


class StopParams(Params):
    """drain_s: seconds that running samples have to end before they are handed back; None leaves the worker's own."""

    drain_s: float | None = Field(default=None, ge=0, le=86400)


class SleepParams(Params):
    """tags: what memory to give up; none means all that is not given up yet. hand_back: as in PauseParams."""

    tags: tuple[MemoryTag, ...] = Field(default=(), max_length=3)
    hand_back: bool = False


class WakeParams(Params):
    """tags: what memory to take again; none means all that was given up."""

    tags: tuple[MemoryTag, ...] = Field(default=(), max_length=3)


class SetVersionParams(Params):
    """version: the number that the engine's weights have from now on."""

    version: Version


class AuditParams(Params):
    """names: at most so many tensors are named for each finding."""

    names: int = Field(default=20, ge=1, le=10_000)


class SaveParams(Params):
    """path: folder on the worker's host; the version gets a folder in it. upload: URL to copy that to, by fsspec.

    format: "safetensors", in the names the trainer uses, with digests; or "sharded", SGLang's own, a part for each
        rank.
    """

    path: Folder
    format: Literal["safetensors", "sharded"] = "safetensors"
    upload: Url = ""


class LoadParams(Params):
    """path: a folder on the worker's host, see sync/disk/checkpoint.py. version: the number it gets, above all that the
    pool has. format: what it must be; "auto" takes what is found."""

    path: Folder
    version: Version = Field(ge=1)
    format: Literal["auto", "snapshot", "safetensors", "sharded"] = "auto"


class LoadAdapterParams(Params):
    """name, version: what jobs call it. path: a folder with PEFT's adapter_config.json and adapter_model.safetensors.

    pinned: it stays when a newer version of it comes.
    """

    name: Name
    version: int = Field(ge=1, lt=1 << 40)
    path: Folder
    pinned: bool = True


class UnloadAdapterParams(Params):
    """version: None for all of them."""

    name: Name
    version: int | None = Field(default=None, ge=1, lt=1 << 40)


class StartProfileParams(Params):
    """folder: where traces go, on the worker's host; by default a new one. activities: by default what the device has.

    steps: forward passes after which it stops by itself.
    """

    folder: Folder | None = None
    activities: tuple[ProfileActivity, ...] = Field(default=(), max_length=3)
    steps: int | None = Field(default=None, ge=1)


class StopProfileParams(Params):
    """upload: URL to copy the traces to, by fsspec. fetch_bytes: so much of them comes with the answer, whole files."""

    upload: Url = ""
    fetch_bytes: int = Field(default=0, ge=0, le=8 << 20)


ACTIONS: dict[str, type[Params]] = {
    "version": NoParams,
    "adapters": NoParams,
    "pause": PauseParams,
    "resume": NoParams,
    "abort": AbortParams,
    "stop": StopParams,
    "sleep": SleepParams,
    "wake": WakeParams,
    "flush_cache": NoParams,
    "clear_storage": NoParams,
    "set_version": SetVersionParams,
    "audit": AuditParams,
    "save": SaveParams,
    "load": LoadParams,
    "load_adapter": LoadAdapterParams,
    "unload_adapter": UnloadAdapterParams,
    "start_profile": StartProfileParams,
    "stop_profile": StopProfileParams,
}


def check_params(action: str, params: Mapping[str, Any]) -> Params:
    """The parameters of an action. Raises InvalidField for one that is not known, and for what it does not take."""
    if action not in ACTIONS:
        raise InvalidField("action", action, f"one of {', '.join(ACTIONS)}")
    try:
        return ACTIONS[action].model_validate(dict(params))
    except ValidationError as error:
        raise as_invalid_field(error) from None
