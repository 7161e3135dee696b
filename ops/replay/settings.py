"""What a replay is given beside the samples: limits, an engine, and where the weights of each version are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...messages.errors import ConfigError, InvalidField
from ...sync.disk import INDEX, NoSuchSnapshot, SnapshotStore, folder_name
from ..journal import Recorded
from .verdict import LOGPROB_LIMIT


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all kinds of replay. Each kind takes what it needs.

    model: folder or hub name of the base model, whose weights are version 0; None for the one that the samples name.
    snapshots: folder of recorded versions, as a SnapshotStore writes it. weights: a checkpoint to use in place of every
    recorded version. adapters: folder with a folder NAME@VERSION for each version of a LoRA adapter, as PEFT saves it.
    engine: settings of the engine, by the names of SGLangConfig's fields.
    logprob_limit: the largest difference of log-probabilities that counts as none, of tokens that are generated again.
    score_limit: of a token's score, where engine and forward pass both compute in float32. mean_limit: of the mean of
    scores, of a sample or of a group of tokens, where one of them does not: single tokens may then be far off.
    dtype, device: of the forward pass that scores. moved: called with how many more tokens were generated or scored.
    Raises InvalidField for a folder that is not there.
    """

    model: str | None = None
    snapshots: Path | None = None
    weights: Path | None = None
    adapters: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    logprob_limit: float = LOGPROB_LIMIT
    score_limit: float = 1e-4
    mean_limit: float = 0.05
    dtype: str = "float32"
    device: str = "cpu"
    moved: Callable[[int], None] = field(default=lambda tokens: None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("snapshots", "weights", "adapters"):
            folder: Path | None = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise InvalidField(f"--{name}", str(folder), "a folder")

    def for_model_of(self, samples: Iterable[Recorded]) -> Settings:
        """These settings with a model: the one that was given, or the samples'. Raises ConfigError without one."""
        given = self.engine.get("model", self.model) or of_all("model", samples)
        if given is None:
            raise ConfigError("--model: nothing else says which model it is")
        return replace(self, model=str(given))

    def path_of(self, version: int) -> Path:
        """The folder of a version, a safetensors checkpoint; for version 0 the base model, which may be a hub name.

        Raises NoSuchSnapshot, which says why there is none.
        """
        if self.weights is not None:
            return self.weights
        if version == 0 and self.model is not None:
            return Path(self.model)
        if self.snapshots is None:
            raise NoSuchSnapshot(f"version {version} sampled it, and no folder of snapshots was given (--snapshots)")
        path = self.snapshots / folder_name(version)
        if not path.is_dir():
            raise NoSuchSnapshot(f"there is no snapshot of version {version} in {self.snapshots}")
        return path

    def verified_path_of(self, version: int) -> Path:
        """The folder of a version. A snapshot's contents are compared with their digests; nothing else has any.

        Raises NoSuchSnapshot, and BrokenSnapshot or DigestMismatch for one that is not what was published.
        """
        path = self.path_of(version)
        if self.snapshots is not None and path.parent == self.snapshots and (path / INDEX).exists():
            with SnapshotStore(self.snapshots).load(version) as opened:
                opened.verify()
        return path

    def adapter_path_of(self, name: str, version: int) -> Path:
        """The folder of a version of an adapter. Raises NoSuchSnapshot, which says why there is none."""
        if self.adapters is None:
            raise NoSuchSnapshot(
                f"adapter {name}@{version} sampled it, and no folder of adapters was given (--adapters)"
            )
        path = self.adapters / f"{name}@{version}"
        if not path.is_dir():
            raise NoSuchSnapshot(f"there is no folder {name}@{version} in {self.adapters}")
        return path


def of_all(name: str, samples: Iterable[Recorded]) -> str | None:
    """What the fingerprints of all samples say, such as their model; None if they say nothing. Raises ConfigError if
    they do not agree."""
    told = {one.result.fingerprint.get(name, "") for one in samples} - {""}
    if len(told) > 1:
        raise ConfigError(f"the samples are of several kinds of {name} ({', '.join(sorted(told))}): give one")
    return min(told, default=None)
