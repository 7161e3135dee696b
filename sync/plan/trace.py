"""Records what a model's `load_weights` would do to the weights, without doing it.

The loader gets stand-ins: meta tensors, which have a shape and no data. Its calls into torch pass a dispatch mode.
Views of a stand-in or of a parameter are made as usual. A copy between them is recorded and not done. Anything else
that would read or write either of them ends the trace with `PlanImpossible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ...messages.errors import WeightSyncError

aten = torch.ops.aten
DERIVES = {aten.clone.default, aten._to_copy.default}
COPIES = {aten.copy_.default, aten.fill_.Tensor}
FILLS = {aten.zero_.default, aten.fill_.Scalar}
FACTORIES = {  # these use only shape, dtype and device
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_full.default,
}
VIEWS_BY_NATURE = {aten._unsafe_view.default}  # an alias, though its schema does not say so


class PlanImpossible(WeightSyncError):
    """This model's loader does more than copying. The text names the operation and the tensor."""


@dataclass(frozen=True, slots=True)
class Source:
    """A view into a checkpoint tensor: `tensor.contiguous().view(-1).view(dtype).as_strided(shape, stride, offset)`.

    offset, stride: in elements of `dtype`. That is the tensor's own dtype, unless the loader viewed its bytes as
    another.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow one another as in the tensor."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True


@dataclass(frozen=True, slots=True)
class Write:
    """One write that the loader would have done, in the order of its calls.

    name: of the checkpoint tensor that the loader got last. source: None for a fill with the constant `value`.
    destination: a view of an engine tensor. The trace does not write to it.
    """

    name: str
    source: Source | None
    value: float
    destination: torch.Tensor


@dataclass(slots=True)
class _Origin:
    """Which elements of a checkpoint tensor a stand-in's storage holds, and where.

    steps: (extent, stride in this storage, stride in the checkpoint tensor) per dimension, largest stride first.
    chain: dtypes that the elements have had, the checkpoint tensor's first.
    storage: kept alive, so that no other storage gets its address.
    """

    name: str
    storage: Any
    offset: int
    steps: list[tuple[int, int, int]]
    chain: tuple[torch.dtype, ...]
    root: bool

    def source(self, view: torch.Tensor) -> Source:
        """Express `view` of this storage as a view of the checkpoint tensor. Raises PlanImpossible if it is none."""
        if self.root:
            strides = _plain(view.shape, view.stride())
            return Source(self.name, view.dtype, tuple(view.shape), strides, view.storage_offset())
        if view.dtype != self.chain[-1]:
            raise PlanImpossible(f"{self.name} is converted and then looked at as {view.dtype}")
        place, offset = view.storage_offset(), self.offset
        reach = []
        for _, step, root_step in self.steps:
            offset += place // step * root_step
            reach.append(place // step)
            place %= step
        root_strides = []
        for extent, stride in zip(view.shape, view.stride(), strict=True):
            left, root_stride = stride, 0
            for index, (_, step, root_step) in enumerate(self.steps):
                root_stride += left // step * root_step
                reach[index] += left // step * max(0, extent - 1)
                left %= step
            root_strides.append(root_stride)
        if any(far >= extent for far, (extent, _, _) in zip(reach, self.steps, strict=True)):
            raise PlanImpossible(f"{self.name} is rearranged, and then viewed across its dimensions")
        return Source(self.name, self.chain[0], tuple(view.shape), _plain(view.shape, root_strides), offset)


def _plain(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides. Dimensions of one element, which may have any, get those of a contiguous tensor."""
    result: list[int] = []
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        inner = shape[len(shape) - len(result)] * result[-1] if result else 1
        result.append(stride if extent > 1 else inner)
    return tuple(reversed(result))


def _steps(shape: Iterable[int], strides: Iterable[int], root: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return dimensions of more than one element, largest stride first. Those that lie alike in both are merged."""
    steps: list[tuple[int, int, int]] = []
    for extent, step, root_step in sorted(zip(shape, strides, root, strict=True), key=lambda s: -s[1]):
        if extent == 1:
            continue
        if steps and steps[-1][1] == extent * step and steps[-1][2] == extent * root_step:
            steps[-1] = (steps[-1][0] * extent, step, root_step)
        else:
            steps.append((extent, step, root_step))
    return steps or [(1, 1, 1)]


class _Scalar:
    """What `.item()` of a stand-in returns. It can only be given to `fill_`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented  # torch only hands an object to `_Scalars` if it has this method


class _Scalars(TorchFunctionMode):  # type: ignore[misc]
    """Records `param.fill_(tensor.item())` as a copy: SGLang loads tensors of one element so."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and self._recorder.is_stand_in(args[0]) and args[0].numel() == 1:
            return _Scalar(args[0])
        if func is torch.Tensor.fill_ and len(args) == 2 and isinstance(args[1], _Scalar):
            return args[0].copy_(args[1].tensor.reshape(()))
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """One trace. names: address of a storage -> name of the engine tensor in it, for error texts."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.used: set[str] = set()
        self.reason: PlanImpossible | None = None
        self._names = names
        self._origins: dict[int, _Origin] = {}
        self._known = set(names)
        self._elementary: set[Any] = set()
        self._current = ""

    def load(self, load: Callable[[Iterable[tuple[str, torch.Tensor]]], object], layout: Mapping[str, Any]) -> None:
        """Call `load` with a stand-in for every (dtype, shape) of `layout`. Raises PlanImpossible."""
        try:
            with torch.no_grad(), _Scalars(self), self:
                load(self._pairs(layout))
        except PlanImpossible as error:
            self.reason = self.reason or error
        except Exception as error:
            self.reason = self.reason or PlanImpossible(
                f"load_weights raised {type(error).__name__} at {self._current}: {error}"
            )
        if self.reason is not None:
            raise self.reason

    def _pairs(self, layout: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape) in layout.items():
            stand_in = torch.empty(shape, dtype=dtype, device="meta")
            self._adopt(stand_in, _Origin(name, stand_in.untyped_storage(), 0, [], (dtype,), True))
            self._current = name
            yield name, stand_in

    def is_stand_in(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and _key(value) in self._origins

    def _adopt(self, tensor: torch.Tensor, origin: _Origin) -> None:
        self._origins[_key(tensor)] = origin
        self._known.add(_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [key for key in map(_key, _tensors((*args, *kwargs.values()))) if key in self._known]
        if not touched:
            return func(*args, **kwargs)
        if func not in self._elementary:
            with self:  # in inference mode `reshape` and the like arrive whole, and what they do depends on the tensor
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            self._elementary.add(func)
        if func.is_view or func in VIEWS_BY_NATURE or func in FACTORIES:
            return func(*args, **kwargs)
        try:
            if func in DERIVES and self.is_stand_in(args[0]):
                return self._derive(func, args, kwargs)
            copied = func in COPIES and self._copy(args[0], args[1])
            if copied or (func in FILLS and self._fill(args[0], 0.0 if len(args) == 1 else args[1])):
                return args[0]
            origin = self._origins.get(touched[0])
            what = origin.name if origin else self._names[touched[0]]
            raise PlanImpossible(f"load_weights calls {func} on {what} (at {self._current})")
        except PlanImpossible as error:
            self.reason = self.reason or error  # a loader may catch it
            raise

    def _derive(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Make the stand-in for a copy: contiguous, in another dtype, or on another device."""
        origin, view = self._origins[_key(args[0])], args[0]
        # It stays a stand-in: a copy on another device, or in pinned memory, has the same elements.
        kwargs = {key: value for key, value in kwargs.items() if key not in {"device", "pin_memory"}}
        result: torch.Tensor = func(*args, **kwargs)
        source = origin.source(view)
        chain = (source.dtype, *origin.chain[1:], result.dtype)
        steps = _steps(result.shape, result.stride(), source.stride)
        self._adopt(result, _Origin(origin.name, result.untyped_storage(), source.offset, steps, chain, False))
        return result

    def _copy(self, destination: torch.Tensor, value: torch.Tensor) -> bool:
        """Record a copy into an engine tensor. Returns False if `destination` is none."""
        origin = self._origins.get(_key(value))
        if _key(destination) not in self._names or value.is_conj() or value.is_neg():
            return False
        if origin is None:
            return bool(destination.numel() == 0)
        self.used.add(origin.name)
        if destination.numel():
            source = origin.source(value.expand(destination.shape))
            chain = [source.dtype, *origin.chain[1:], destination.dtype]
            through = [dtype for index, dtype in enumerate(chain) if index == 0 or dtype != chain[index - 1]]
            if len(through) > 2:
                raise PlanImpossible(f"{origin.name} is converted by way of {through[1]}")
            target = destination.detach()
            target = target.as_strided(target.shape, _plain(target.shape, target.stride()), target.storage_offset())
            self.writes.append(Write(origin.name, source, 0.0, target))
        return True

    def _fill(self, destination: torch.Tensor, value: float) -> bool:
        """Record that an engine tensor is filled with a constant. Returns False for a stand-in."""
        if self.is_stand_in(destination):
            return False
        if destination.numel():
            self.writes.append(Write(self._current, None, value, destination.detach()))
        return True


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments, also those inside lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _key(tensor: torch.Tensor) -> int:
    """Return the address of torch's storage object, which views share, or 0 if there is none."""
    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def storage_key(name: str, tensor: torch.Tensor) -> int:
    """Return the key of an engine tensor's storage. Raises PlanImpossible if the tensor is not plain memory."""
    if torch.nn.parameter.is_lazy(tensor) or (key := _key(tensor)) == 0:
        raise PlanImpossible(f"{name} is a {type(tensor).__name__}, not plain memory")
    return key
