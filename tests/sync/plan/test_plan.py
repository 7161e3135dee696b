"""The copy plan against the loaders it replaces: the same bits in every parameter, or no plan and untouched weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from rolloutmq.messages import InvalidField
from rolloutmq.messages.model.weights import TensorSpec
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.plan import Bound, CopyPlan, PlanImpossible
from rolloutmq.sync.plan.trace import Source
from rolloutmq.sync.tensors.digester import digest

WIDTH, INNER, EXPERTS, ROWS, PADDED = 8, 6, 3, 10, 12
Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    """A model's worth of ways to load, in the manner of SGLang's loaders; rank `rank` of `tp`."""

    def __init__(self, rank: int = 0, tp: int = 1, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank, self.tp = rank, tp

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape).to(dtype))

        self.embed = parameter(PADDED, WIDTH)
        self.head = self.embed if tied else parameter(PADDED, WIDTH)
        self.qkv = parameter(3 * WIDTH // tp, WIDTH)
        self.out = parameter(WIDTH, WIDTH // tp)
        self.w13 = parameter(EXPERTS, 2 * INNER // tp, WIDTH)
        self.w2 = parameter(EXPERTS, WIDTH, INNER // tp)
        self.scale = parameter(1)
        self.register_buffer("frequencies", torch.randn(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, loaded in weights:
            if name in {"embed", "head"}:
                parameter = parameters[name]
                assert loaded.shape[0] == ROWS
                parameter[:ROWS].data.copy_(loaded)
                parameter[ROWS:].data.fill_(0)
            elif name in {"q", "k", "v"}:
                size = WIDTH // self.tp
                target = self.qkv.data.narrow(0, "qkv".index(name) * size, size)
                target.copy_(loaded.narrow(0, self.rank * size, size))
            elif name == "out":
                self.out.data.copy_(loaded.chunk(self.tp, dim=1)[self.rank])
            elif name.startswith("experts"):
                _, expert, part = name.split(".")
                self._expert(int(expert), part, loaded)
            elif name == "scale" and self.scale.numel() == loaded.numel() == 1:
                self.scale.data.fill_(loaded.item())

    def _expert(self, expert: int, part: str, loaded: torch.Tensor) -> None:
        size = INNER // self.tp
        if part == "down":
            self.w2.data[expert] = loaded.narrow(1, self.rank * size, size)
        else:
            half = self.w13.data[expert].narrow(0, 0 if part == "gate" else size, size)
            half.copy_(loaded.to(half.dtype)[self.rank * size : (self.rank + 1) * size].contiguous())


class Loads(nn.Module):
    """A model whose loader is this function."""

    def __init__(self, load: Callable[[Any], object]) -> None:
        super().__init__()
        self.load_weights = load


def checkpoint(dtype: torch.dtype = torch.float32, **extra: torch.Tensor) -> Tensors:
    tensors = {"embed": torch.randn(ROWS, WIDTH), "head": torch.randn(ROWS, WIDTH)}
    tensors |= {name: torch.randn(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    for expert in range(EXPERTS):
        tensors |= {f"experts.{expert}.{part}": torch.randn(INNER, WIDTH) for part in ("gate", "up")}
        tensors[f"experts.{expert}.down"] = torch.randn(WIDTH, INNER)
    tensors["scale"] = torch.randn(())
    return {name: tensor.to(dtype) for name, tensor in tensors.items()} | extra


def bind(plan: CopyPlan, tensors: Tensors) -> Bound:
    """The copies of these tensors, out of one bucket."""
    snapshot = PackedWeights(1, tensors.items()).snapshot()
    (bound,) = plan.for_layout(snapshot.buckets)
    return bound


def specs_of(tensors: Tensors, bucket_bytes: int = 1 << 20) -> tuple[TensorSpec, ...]:
    return PackedWeights(1, tensors.items(), bucket_bytes).snapshot().manifest.tensors


def state(model: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, expected: Tensors) -> None:
    for name, tensor in state(model).items():
        assert torch.equal(tensor, expected[name]), name


def loaded_by_hand(model: Layer, tensors: Tensors) -> Tensors:
    """What `load_weights` makes of it; the model is put back afterwards."""
    before = state(model)
    with torch.no_grad():
        model.load_weights(tensors.items())
    result = state(model)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(before[name])
    return result


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_replay_gives_the_bits_of_load_weights(
    mode: Callable[[], AbstractContextManager[None]], tied: bool, rank: int, tp: int, sent: torch.dtype
) -> None:
    """Fused, tied, experts, a scalar, padding, tensor parallel slices and a conversion; in any order of buckets."""
    tensors = checkpoint(sent)
    with mode():
        model = Layer(rank, tp, tied)
        before, expected = state(model), loaded_by_hand(model, tensors)
        snapshot = PackedWeights(1, tensors.items(), bucket_bytes=700).snapshot()
        plan = CopyPlan.trace(model, snapshot.manifest.tensors)
        assert_same(model, before)
        assert (plan.missing, plan.unused) == ([], [])
        bounds = plan.for_layout(snapshot.buckets)
        assert len(bounds) > 3
        for bound in reversed(bounds):
            bound.run()
        assert_same(model, expected)
        digests = {spec.name: spec.digest for spec in snapshot.manifest.tensors}
        for bound in bounds:
            assert all(digest(target) == digests[name] for name, target in bound.whole)
            assert all(digest(source.to(target.dtype)) == digest(target) for _, source, target in bound.partial)
        checked = [entry[0] for bound in bounds for entry in (*bound.whole, *bound.partial)]
        assert sorted(checked) == sorted(set(tensors) - ({"embed"} if tied else set()))


def test_whole_and_partial() -> None:
    tensors = checkpoint()
    specs = specs_of(tensors)
    assert {name for name, *_ in bind(CopyPlan.trace(Layer(), specs), tensors).partial} == set()
    cut = bind(CopyPlan.trace(Layer(1, 2), specs), tensors)
    assert {name for name, *_ in cut.whole} == {"head", "scale"}
    assert CopyPlan.trace(Layer(1, 2), specs).copies["out"][0].source == Source(
        "out", torch.float32, (WIDTH, WIDTH // 2), (WIDTH, 1), WIDTH // 2
    )
    assert bind(CopyPlan.trace(Layer(dtype=torch.bfloat16), specs), tensors).whole == []


def test_of_two_tied_names_the_last_wins_and_the_first_is_not_compared() -> None:
    tensors = checkpoint()
    model = Layer(tied=True)
    plan = CopyPlan.trace(model, specs_of(tensors))
    assert list(plan.superseded) == ["embed"]
    bind(plan, tensors).run()
    assert torch.equal(model.embed[:ROWS], tensors["head"])
    assert list(CopyPlan.trace(Layer(tied=False), specs_of(tensors)).superseded) == []


def test_names_without_effect_and_parameters_without_source() -> None:
    tensors = checkpoint(**{"rotary.inv_freq": torch.randn(4)})
    del tensors["experts.1.up"], tensors["scale"]
    plan = CopyPlan.trace(Layer(), specs_of(tensors))
    assert plan.unused == ["rotary.inv_freq"]
    assert plan.missing == ["w13", "scale"]


def test_buckets_may_take_turns_in_one_buffer() -> None:
    model, tensors = Layer(), checkpoint()
    snapshot = PackedWeights(2, tensors.items(), 500).snapshot()
    expected = loaded_by_hand(model, tensors)
    shared = torch.empty(3 + max(bucket.numel() for bucket in snapshot.buckets), dtype=torch.uint8)
    bounds = CopyPlan.trace(model, snapshot.manifest.tensors).for_layout([shared] * len(snapshot.buckets))
    for bucket, bound in zip(snapshot.buckets, bounds, strict=True):
        shared[: bucket.numel()].copy_(bucket)
        bound.run()
    assert_same(model, expected)


def test_export_is_the_checkpoint_again() -> None:
    tensors = checkpoint(**{"rotary.inv_freq": torch.randn(4)})
    model = Layer(tied=False)
    plan = CopyPlan.trace(model, specs_of(tensors))
    bind(plan, tensors).run()
    held = plan.export()
    assert held.keys() == tensors.keys() - {"rotary.inv_freq"}
    assert all(digest(held[name]) == digest(tensors[name]) for name in held)
    assert all(held[name].shape == tensors[name].shape for name in held)
    assert held["q"].untyped_storage().data_ptr() == model.qkv.untyped_storage().data_ptr()
    with pytest.raises(PlanImpossible, match="does not hold q whole"):
        CopyPlan.trace(Layer(0, 2), specs_of(tensors)).export()


def test_what_is_bound_must_be_what_was_traced() -> None:
    tensors = checkpoint()
    snapshot = PackedWeights(1, tensors.items()).snapshot()
    plan = CopyPlan.trace(Layer(), snapshot.manifest.tensors)
    last = snapshot.manifest.tensors[-1]
    with pytest.raises(InvalidField, match="inside"):
        plan.for_layout([snapshot.buckets[0][: last.offset + last.nbytes - 1]])
    with pytest.raises(InvalidField, match="inside"):
        plan.for_layout([])
    spec = snapshot.manifest.tensors[0]
    with pytest.raises(InvalidField, match="aligned"):
        CopyPlan.trace(Layer(), [spec.model_copy(update={"offset": 2})]).for_layout(snapshot.buckets)
    with pytest.raises(InvalidField, match="every name once"):
        CopyPlan.trace(Layer(), [spec, spec])
    with pytest.raises(InvalidField, match="a torch dtype"):
        CopyPlan.trace(Layer(), [spec.model_copy(update={"dtype": "load"})])


class One(nn.Module):
    """One parameter and whatever `load` does with it."""

    def __init__(self, load: Callable[[One, torch.Tensor], object], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape or (4, 6)))
        self.derived = torch.zeros(4, 6)
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            self._load(self, loaded)


def swallow(model: One, loaded: torch.Tensor) -> None:
    try:
        model.weight.data.mul_(2)
    except PlanImpossible:
        model.weight.data.copy_(loaded)


def late_failure(model: One, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(loaded)
    raise ValueError("no such layer")


def replace(model: One, loaded: torch.Tensor) -> None:
    model.weight = nn.Parameter(torch.empty_like(model.derived))


def copy_twice(model: One, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(loaded)
    model.weight.data[1:3].copy_(loaded[:2])


IMPOSSIBLE: dict[str, tuple[Callable[[One, torch.Tensor], object], str]] = {
    "arithmetic on the tensor": (lambda m, w: m.weight.data.copy_(w * 2), r"aten.mul.Tensor on w "),
    "arithmetic on the parameter": (lambda m, w: m.weight.data.add_(w), r"aten.add_.Tensor on weight "),
    "a weight derived from it": (lambda m, w: m.derived.copy_(w), r"aten.copy_.default on w "),
    "a weight derived from the parameter": (
        lambda m, w: (m.weight.data.copy_(w), setattr(m, "derived", m.weight.data.t().clone())),
        r"aten.clone.default on weight ",
    ),
    "something else in the parameter": (lambda m, w: m.weight.data.copy_(m.derived), r"aten.copy_.default on weight "),
    "a look at the tensor": (lambda m, w: float(w[0, 0]), r"_local_scalar_dense.default on w "),
    "a scalar that is calculated with": (lambda m, w: w[0, 0].item() * 2, r"TypeError"),
    "a look at the parameter": (lambda m, w: bool((m.weight != 1).any()), r"aten.ne.Scalar on weight "),
    "two tensors put together": (lambda m, w: m.weight.data.copy_(torch.cat([w[:2], w[2:]])), r"aten.cat.default on w"),
    "two conversions": (lambda m, w: m.weight.data.copy_(w.half().double()), r"by way of torch.float16"),
    "a view across what was rearranged": (
        lambda m, w: m.weight.data.copy_(w.t().contiguous().view(4, 6)),
        r"viewed across its dimensions",
    ),
    "every second row": (lambda m, w: m.weight.data[::2].copy_(w[:2]), r"with gaps"),
    "a part overwritten": (copy_twice, r"overwritten in part"),
    "an error that the loader hides": (swallow, r"aten.mul_.Tensor on weight"),
    "an error of the loader": (late_failure, r"ValueError at w: no such layer"),
    "another shape": (lambda m, w: m.weight.data.copy_(w[:, :5]), r"RuntimeError at w"),
    "another parameter": (replace, r"replaces weight"),
    "other memory": (lambda m, w: setattr(m.weight, "data", m.derived), r"replaces weight"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_what_is_more_than_copying_is_named_and_not_done(
    what: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    load, message = IMPOSSIBLE[what]
    with mode():
        model = One(load)
        parameter, address, before = model.weight, model.weight.data_ptr(), model.weight.detach().clone()
        with pytest.raises(PlanImpossible, match=message):
            CopyPlan.trace(model, specs_of({"w": torch.randn(4, 6)}))
        assert model.weight is parameter
        assert model.weight.data_ptr() == address
        assert torch.equal(model.weight, before)
        assert not model.derived.any()


POSSIBLE: dict[str, Callable[[One, torch.Tensor], object]] = {
    "transposed and back": lambda m, w: m.weight.data.copy_(w.t().contiguous().t()),
    "flattened": lambda m, w: m.weight.data.view(-1).copy_(w.reshape(-1)),
    "rearranged in blocks": lambda m, w: m.weight.data.view(2, 2, 6).copy_(
        w.view(2, 2, 6).transpose(0, 1).contiguous().to(torch.float32, copy=True)
    ),
    "cut from a copy": lambda m, w: m.weight.data[1:3, 2:5].copy_(w.t().clone().t()[:2, 1:4]),
    "rows of columns": lambda m, w: [t.copy_(s) for t, s in zip(m.weight.data.unbind(1), w.unbind(1), strict=True)],
    "a broadcast row": lambda m, w: m.weight.data.copy_(w[1]),
    "as other bits": lambda m, w: m.weight.data.copy_(w.view(torch.int32).contiguous()),
    "zeros around it": lambda m, w: (m.weight.data.zero_(), m.weight.data[1:3, 2:4].copy_(w[:2, :2])),
    "one element": lambda m, w: m.weight.data.copy_(w[2, 3].reshape(1, 1).expand(4, 6)),
    "to the parameter's device and dtype": lambda m, w: m.weight.data.copy_(w.to(m.weight.device, m.weight.dtype)),
    "besides nothing at all": lambda m, w: [
        m.weight.data[:0].copy_(torch.zeros_like(m.weight.data[:0])),
        m.weight.data.copy_(w),
    ],
    "by assignment": lambda m, w: m.weight.data.__setitem__(slice(0, 2), w[2:]),
}


@pytest.mark.parametrize("what", POSSIBLE)
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_views_of_any_kind_are_followed(what: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode(), torch.no_grad():
        model, tensors = One(POSSIBLE[what]), {"w": torch.randn(4, 6)}
        before = model.weight.detach().clone()
        plan = CopyPlan.trace(model, specs_of(tensors))
        assert torch.equal(model.weight, before)
        bind(plan, tensors).run()
        replayed = model.weight.detach().clone()
        model.weight.copy_(before)
        model.load_weights(tensors.items())
        assert torch.equal(replayed, model.weight)
        assert not torch.equal(replayed, before)


def test_parameters_in_one_flat_storage_are_told_apart() -> None:
    flat = torch.randn(20)
    model = Loads(lambda pairs: [model.second.data.copy_(w) for _, w in pairs])
    model.first, model.second = nn.Parameter(flat[:8].view(2, 4)), nn.Parameter(flat[8:20].view(3, 4))
    tensors = {"second": torch.randn(3, 4)}
    plan = CopyPlan.trace(model, specs_of(tensors))
    assert plan.missing == ["first"]
    bind(plan, tensors).run()
    assert torch.equal(flat[8:].view(3, 4), tensors["second"])


def test_parameters_that_lie_in_one_another_have_no_plan() -> None:
    flat = torch.randn(20)
    model = Loads(list)
    model.first, model.second = nn.Parameter(flat[:12]), nn.Parameter(flat[8:])
    with pytest.raises(PlanImpossible, match="second"):
        CopyPlan.trace(model, specs_of({"w": torch.randn(4)}))


@pytest.mark.slow
def test_thousands_of_expert_slices_are_settled_quickly() -> None:
    """A broken plan of this size would be seen by its coverage; the time limit is the test runner's own."""
    experts = 2048

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            expert, half = divmod(int(name), 2)
            model.w13.data[expert].narrow(1, 3 * half, 3).copy_(tensor)

    model = Loads(load)
    model.w13 = nn.Parameter(torch.zeros(experts, 4, 6))
    tensors = {str(index): torch.full((4, 3), float(index)) for index in range(2 * experts)}
    plan = CopyPlan.trace(model, specs_of(tensors))
    assert plan.missing == []
    bind(plan, tensors).run()
    assert torch.equal(model.w13[:, 0, 0], torch.arange(0.0, 2 * experts, 2))
    del tensors["4095"]
    assert CopyPlan.trace(model, specs_of(tensors)).missing == ["w13"]
