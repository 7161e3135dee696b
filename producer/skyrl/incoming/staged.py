"""The tensors received so far, until they are published as one version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....messages.errors import DigestMismatch, WeightSyncError
from .request import Update

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 5


class IncompleteWeights(WeightSyncError):
    """A sync ended before all tensors of the model arrived. Nothing was announced, and the received ones are dropped.

    missing: the names of the missing tensors.
    """

    def __init__(self, missing: list[str]) -> None:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        super().__init__(
            f"{len(missing)} tensors of the model did not come: {', '.join(missing[:SHOWN])}{more}; "
            "every version has all of them"
        )
        self.missing = missing


class StagedTensors:
    """Tensors by name, of a version that is not published yet.

    version: its number, None for the next number. name: the trainer's name for it, "" without one. known: the tensors
    of the last version that a worker accepted from the trainer, None if there is none.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.version: int | None = None
        self.name = ""
        self.known: Shapes | None = None

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def begins_anew(self, update: Update) -> bool:
        """Whether a tensor comes again. The previous sync has then ended, although nothing announced its end."""
        return any(name in self.tensors for name in update.names)

    def take(self) -> dict[str, Any]:
        """Return all tensors and forget them."""
        tensors, self.tensors = self.tensors, {}
        return tensors

    def check(self, shapes: Shapes, checkpoint: Shapes) -> None:
        """Compare the tensors with the last accepted version, or, before there is one, with the model's checkpoint.

        Without either everything passes, because the workers know their model's tensors and name those they refuse.
        They also decide whether a tied tensor may be missing. Raises IncompleteWeights, or WeightSyncError for tensors
        that the model does not have.
        """
        from ....sync.receive import TIED, check_names  # noqa: PLC0415 – torch, which this module has no other need of

        complete = checkpoint if self.known is None else self.known
        if missing := sorted(complete.keys() - shapes.keys() - TIED):
            raise IncompleteWeights(missing)
        if self.known is not None or not checkpoint:
            return
        try:
            check_names(shapes, checkpoint)
        except DigestMismatch as error:
            raise WeightSyncError(f"{error}; nothing was announced") from None
