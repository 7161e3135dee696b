"""The base class of logit processors, and the rows of a batch that one works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def tensor_on(device: torch.device, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return numbers as a tensor on `device`. A plain copy would wait for the whole forward pass that a GPU still has
    to do, and nothing could be prepared for the next one meanwhile."""
    import torch  # noqa: PLC0415

    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


class Request(Protocol):
    """One sample's request in the engine, as :class:`Rows` uses it."""

    kept: dict[int, Any]

    def prompt_ids(self) -> list[int]:
        """Return the token ids of its sample's prompt."""
        ...

    def generated_ids(self, count: int) -> list[int]:
        """Return the first `count` tokens that its sample has generated. count: as many as there are."""
        ...


class Rows:
    """The rows of one call, one for each sample that is about to get its next token.

    params: each row's parameters for the processor, from its job.
    generated: (rows,) int64 on the device of the logits: number of tokens that each sample has generated before this
    one,
        over all its legs. It is exact, whatever the engine has in flight.
    """

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]],
        generated: torch.Tensor,
        requests: Sequence[Request],
        places: Sequence[int],
        shared: dict[str, Any],
    ) -> None:
        """places: the processor's place in the list of each row's job. shared: lives as long as the same rows stay."""
        self.params = params
        self.generated = generated
        self._requests, self._places, self._shared = requests, places, shared
        self._counts: list[int] | None = None

    def __len__(self) -> int:
        return len(self.params)

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return numbers as a tensor on the device of the logits, without waiting for the forward pass."""
        return tensor_on(self.generated.device, values, dtype)

    def counts(self) -> list[int]:
        """Return `generated` as numbers. On a GPU it waits for the forward pass, which `generated` itself does not."""
        if self._counts is None:
            self._counts = self.generated.tolist()
        return self._counts

    def generated_ids(self, row: int) -> list[int]:
        """Return the tokens that the row's sample has generated, over all its legs. It waits as `counts` does."""
        return self._requests[row].generated_ids(self.counts()[row])

    def prompt_ids(self, row: int) -> list[int]:
        """Return the token ids of the prompt of the row's sample."""
        return self._requests[row].prompt_ids()

    def keep(self, row: int, make: Callable[[], T]) -> T:
        """Return `make()`, called once for each request and processor.

        For a tensor made of its parameters, for example.
        """
        kept, place = self._requests[row].kept, self._places[row]
        if place not in kept:
            kept[place] = make()
        found: T = kept[place]
        return found

    def keep_all(self, make: Callable[[], T]) -> T:
        """Return `make()`, called once for these rows. It is called again when a sample comes or goes."""
        if "all" not in self._shared:
            self._shared["all"] = make()
        found: T = self._shared["all"]
        return found


class LogitProcessor:
    """The base class. One object serves every sample in a scheduler process, so it keeps no state of a sample.

    Its result may only depend on the parameters and the tokens. After an interruption it is called for the same token
    again, and in the middle of a chunked prefill for tokens that are thrown away.
    """

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        """Raise InvalidField for parameters that it cannot work with. It is called in the worker."""

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change `logits`, (rows, vocabulary) of the model's or a wider floating dtype, in place.

        -inf makes a token impossible. A row without any possible token fails its job, and so does an exception.
        """

    def temperature(self, rows: Rows) -> torch.Tensor | None:
        """Return (rows,) temperatures above 0 for this token, or None to keep the jobs' own."""
        return None
