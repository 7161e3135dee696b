"""What a logit processor is, and what it is told of the rows it works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Request(Protocol):
    """One sample's request in the engine, as :class:`Rows` needs it."""

    kept: dict[int, Any]

    def prompt_ids(self) -> list[int]:
        """Of its sample."""
        ...

    def generated_ids(self, count: int) -> list[int]:
        """The first `count` tokens that its sample has generated: all there are."""
        ...


class Rows:
    """The rows of one call, one for each sample that is about to get its next token.

    params: what each row's job gave the processor.
    generated: (rows,) int64 on the device of the logits: how many tokens each sample has generated before this one,
        over all its legs. Exact, whatever the engine has in flight.
    """

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]],
        generated: torch.Tensor,
        requests: Sequence[Request],
        places: Sequence[int],
        shared: dict[str, Any],
    ) -> None:
        """places: where each row's job has this processor in its list. shared: lives as long as these very rows do."""
        self.params = params
        self.generated = generated
        self._requests, self._places, self._shared = requests, places, shared
        self._counts: list[int] | None = None

    def __len__(self) -> int:
        return len(self.params)

    def counts(self) -> list[int]:
        """`generated` as numbers. On a GPU this waits for the forward pass; what stays on the device does not."""
        if self._counts is None:
            self._counts = self.generated.tolist()
        return self._counts

    def generated_ids(self, row: int) -> list[int]:
        """The tokens that row's sample has generated, over all its legs. Waits as `counts` does."""
        return self._requests[row].generated_ids(self.counts()[row])

    def prompt_ids(self, row: int) -> list[int]:
        """The prompt of that row's sample."""
        return self._requests[row].prompt_ids()

    def keep(self, row: int, make: Callable[[], T]) -> T:
        """`make()`, once for each request and each of its processors: a tensor made of its parameters, for example."""
        kept, place = self._requests[row].kept, self._places[row]
        if place not in kept:
            kept[place] = make()
        found: T = kept[place]
        return found

    def keep_all(self, make: Callable[[], T]) -> T:
        """`make()`, once for these rows: made anew when a sample comes or goes, not for every token."""
        if "all" not in self._shared:
            self._shared["all"] = make()
        found: T = self._shared["all"]
        return found


class LogitProcessor:
    """Base of all. One object serves every sample in a scheduler process: it keeps nothing of a sample in itself.

    The same sample is asked about the same token again when it goes on after an interruption, and about tokens that are
    thrown away (in the middle of a chunked prefill): what comes out may only depend on the parameters and the tokens.
    """

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        """Raise InvalidField (field, value, allowed) for parameters it cannot work with. Called in the worker."""

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change `logits` (rows, vocabulary), of the model's or a wider floating dtype, in place.

        -inf takes a token away. A row without any token left fails its job, and so does an exception.
        """

    def temperature(self, rows: Rows) -> torch.Tensor | None:
        """(rows,) temperatures above 0 for this token, in place of the job's; None leaves those."""
        return None
