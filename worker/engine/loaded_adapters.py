"""The LoRA adapters in an engine: their versions, the samples that use them, and whether a job can run with them."""

from __future__ import annotations

from weakref import WeakSet

from ...messages.errors import InvalidField, RequestRefused
from ...messages.model import GenerateJob

FEATURE = "lora"
"""A feature of EngineInfo.features: the engine was started for adapters."""
NOT_ENABLED = "LoRA is not enabled on this worker's engine: start the worker with --max-lora-rank"


class AdapterUse:
    """A sample's hold on one version of an adapter. The engine keeps the version as long as this object exists."""

    __slots__ = ("__weakref__", "name", "version")

    def __init__(self, name: str, version: int) -> None:
        self.name, self.version = name, version


class LoadedAdapters:
    """The adapter versions of one life of an engine."""

    def __init__(self) -> None:
        self._versions: dict[str, set[int]] = {}
        self._uses: WeakSet[AdapterUse] = WeakSet()
        self.pinned: set[tuple[str, int]] = set()
        """(name, version) of versions that stay when newer ones come."""

    def versions(self) -> dict[str, tuple[int, ...]]:
        """Return name -> versions in the engine, oldest first."""
        return {name: tuple(sorted(versions)) for name, versions in self._versions.items() if versions}

    def used(self, name: str, version: int) -> bool:
        """Return whether a sample holds this version."""
        return any((use.name, use.version) == (name, version) for use in self._uses)

    def newest(self, name: str) -> int:
        """Return the newest version of an adapter, 0 if the engine has none."""
        return max(self._versions.get(name, ()), default=0)

    def current(self) -> dict[str, int]:
        """Return name -> newest version."""
        return {name: max(versions) for name, versions in self._versions.items() if versions}

    def add(self, name: str, version: int) -> None:
        """Note that the engine has this version."""
        self._versions.setdefault(name, set()).add(version)

    def remove(self, name: str, version: int) -> None:
        """Note that the engine is about to unload this version, so that no sample begins with it."""
        self._versions.get(name, set()).discard(version)

    def has(self, name: str, version: int) -> bool:
        """Return whether requests may use this version."""
        return version in self._versions.get(name, ())

    def use(self, name: str, before: int = 0) -> AdapterUse:
        """Hold a version for a leg of a sample: `before`, which it has used so far, if it is here, else the newest."""
        use = AdapterUse(name, before if self.has(name, before) else self.newest(name))
        self._uses.add(use)
        return use

    def superseded(self) -> list[tuple[str, int]]:
        """Return (name, version) of versions that are not the newest, not used by a sample, and not pinned."""
        used = {(use.name, use.version) for use in self._uses} | self.pinned
        return [
            (name, version)
            for name, versions in self._versions.items()
            for version in sorted(versions)
            if version < max(versions) and (name, version) not in used
        ]


class AdapterMissing(RequestRefused):
    """The job's adapter, or that version of it, is not on this worker. It may be in the pool."""

    def __init__(self, adapter: str, text: str) -> None:
        super().__init__(text)
        self.adapter = adapter


def check(job: GenerateJob, adapters: LoadedAdapters, features: frozenset[str]) -> None:
    """Raise AdapterMissing for a job that cannot run with these adapters."""
    if job.lora is None:
        return
    if FEATURE not in features:
        unable = InvalidField("lora", job.lora, NOT_ENABLED)
        raise AdapterMissing(job.lora, str(unable))
    newest = adapters.newest(job.lora)
    if newest >= max(1, job.min_adapter_version):
        return
    if newest:
        text = str(InvalidField("min_adapter_version", job.min_adapter_version, f"at most {newest} of {job.lora!r}"))
    else:
        text = str(
            InvalidField("lora", job.lora, f"an adapter that this worker has: {adapter_names(adapters.current())}")
        )
    raise AdapterMissing(job.lora, text)


def adapter_names(adapters: dict[str, int]) -> str:
    return ", ".join(repr(name) for name in sorted(adapters)) or "none"
