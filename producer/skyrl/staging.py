"""What has come of a version that is not complete yet, and whether it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...messages.errors import DigestMismatch, WeightSyncError

if TYPE_CHECKING:
    from .updates import Update

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 5


class IncompleteWeights(WeightSyncError):
    """A sync ended, and tensors of the model had not come. Nothing was announced to the pool; what had come is dropped.

    missing: their names.
    """

    def __init__(self, missing: list[str]) -> None:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        super().__init__(
            f"{len(missing)} tensors of the model did not come: {', '.join(missing[:SHOWN])}{more}; "
            "every version has all of them"
        )
        self.missing = missing


class Staging:
    """Tensors by name. version: the number they are to get, None for the next one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.version: int | None = None
        self._known: Shapes | None = None

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def begins_anew(self, update: Update) -> bool:
        """Whether a tensor comes again: the sync before has ended, and nobody said so."""
        return any(name in self.tensors for name in update.names)

    def take(self) -> dict[str, Any]:
        """What there is; nothing is left."""
        tensors, self.tensors = self.tensors, {}
        return tensors

    def check(self, tensors: Mapping[str, Any], checkpoint: Shapes) -> None:
        """Compare with the last version that was whole, or, before the first, with the model's checkpoint.

        Without either everything passes: the workers know what their model needs, and refuse by name.
        Raises IncompleteWeights, or DigestMismatch for what the model has not.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if self._known is not None:
            if missing := sorted(self._known.keys() - shapes.keys()):
                raise IncompleteWeights(missing)
            return
        if not checkpoint:
            return
        from ...sync.receive import TIED, check_names  # noqa: PLC0415 – torch, which this module has no other need of

        if missing := sorted(checkpoint.keys() - shapes.keys() - set(TIED)):
            raise IncompleteWeights(missing)
        try:
            check_names(shapes, checkpoint)
        except DigestMismatch as error:
            raise WeightSyncError(f"{error}; nothing was announced") from None

    def remember(self, tensors: Mapping[str, Any]) -> None:
        """These were a whole version."""
        self._known = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
