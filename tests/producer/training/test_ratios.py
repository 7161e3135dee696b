"""Importance ratios against values worked out by hand, and the gap of log-probabilities by version."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rolloutmq import InvalidField
from rolloutmq.producer.training.ratios import importance_ratios, logprob_gaps, masked, truncated

LOG2 = math.log(2.0)
BEHAVIOUR = torch.tensor([[-9.0, -1.0, -2.0, 0.0], [-9.0, -1.0, 0.0, 0.0]])
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])
PI = BEHAVIOUR + torch.tensor([[9.0, 2 * LOG2, -LOG2, 9.0], [9.0, LOG2, 9.0, 9.0]])


@pytest.mark.parametrize(
    ("level", "first", "second"),
    [("token", [0, 4, 0.5, 0], 2.0), ("sequence", [0, 2, 2, 0], 2.0), ("geometric", [0, 2**0.5, 2**0.5, 0], 2.0)],
)
def test_ratios(level: Any, first: list[float], second: float) -> None:
    ratios = importance_ratios(PI, BEHAVIOUR, MASK, level)
    torch.testing.assert_close(ratios, torch.tensor([first, [0, second, 0, 0]]))


def test_ratios_have_the_gradient_and_no_nan() -> None:
    """What is masked may be anything, as in a history whose prompt has NaN; no gradient goes there."""
    behaviour = torch.where(MASK.bool(), BEHAVIOUR, math.nan)
    logprobs = PI.clone().requires_grad_()
    importance_ratios(logprobs, behaviour, MASK).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0, 4, 0.5, 0], [0, 2.0, 0, 0]]))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bound", [truncated, masked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_ratio_beyond_the_dtype_has_no_gradient_and_no_nan(level: Any, bound: Any, dtype: torch.dtype) -> None:
    behaviour = torch.tensor([[-999.0, -1.0], [-1.0, -1.0]], dtype=dtype)
    logprobs = torch.full((2, 2), -1.0, dtype=dtype, requires_grad=True)
    ratios = importance_ratios(logprobs, behaviour, torch.ones(2, 2), level)
    assert ratios.isfinite().all()
    bound(ratios).sum().backward()
    first = [0.0, 1.0] if level == "token" else [0.0, 0.0]
    second = [2.0, 2.0] if level == "sequence" else [1.0, 1.0]
    assert logprobs.grad.tolist() == [first, second]


def test_a_row_without_generated_tokens() -> None:
    nothing = torch.zeros_like(MASK)
    for level in ("token", "sequence", "geometric"):
        assert importance_ratios(PI, BEHAVIOUR, nothing, level).tolist() == [[0] * 4] * 2  # type: ignore[arg-type]


def test_truncated_and_masked() -> None:
    ratios = torch.tensor([0.0, 0.4, 0.5, 1.0, 2.0, 4.0])
    torch.testing.assert_close(truncated(ratios), torch.tensor([0.0, 0.4, 0.5, 1.0, 2.0, 2.0]))
    torch.testing.assert_close(masked(ratios), torch.tensor([0.0, 0.0, 0.5, 1.0, 2.0, 0.0]))


def test_the_truncated_estimate_is_between_none_and_full_correction() -> None:
    """Off-policy, the full correction is unbiased, and truncation trades some of that for variance."""
    generator = torch.Generator().manual_seed(0)
    mu, pi = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    value = torch.tensor([0.0, 1.0, 3.0])
    drawn = torch.multinomial(mu, 200_000, replacement=True, generator=generator)
    ratios = importance_ratios(pi.log()[drawn], mu.log()[drawn], torch.ones_like(drawn))
    plain, full = float(value[drawn].mean()), float((ratios * value[drawn]).mean())
    cut = float((truncated(ratios) * value[drawn]).mean())
    assert full == pytest.approx(float((pi * value).sum()), abs=0.03)
    assert plain < cut < full
    assert (truncated(ratios) * value[drawn]).var() < (ratios * value[drawn]).var()


def test_gaps_by_version() -> None:
    versions = torch.tensor([[-1, 3, 3, -1], [-1, 4, -1, -1]])
    gaps = logprob_gaps(PI, BEHAVIOUR, MASK, versions)
    assert sorted(gaps) == [3, 4]
    assert gaps[3]["tokens"] == 2
    assert gaps[3]["mean"] == pytest.approx(1.5 * LOG2)
    assert gaps[3]["max"] == pytest.approx(2 * LOG2)
    assert gaps[3]["ratio"] == pytest.approx(2.25)
    assert gaps[4]["kl"] == pytest.approx(1 - LOG2)
    assert logprob_gaps(PI, BEHAVIOUR, torch.zeros_like(MASK), versions) == {}


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: importance_ratios(PI, BEHAVIOUR, MASK, "word"), "level"),  # type: ignore[arg-type]
        (lambda: importance_ratios(PI, BEHAVIOUR[0], MASK), "shapes"),
        (lambda: importance_ratios(PI[0], BEHAVIOUR[0], MASK[0], "sequence"), "level"),
        (lambda: truncated(PI, 0.0), "most"),
        (lambda: truncated(PI, math.nan), "most"),
        (lambda: masked(PI, 2.0, 1.0), "least"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        call()
    assert raised.value.field == field


def test_nested_tensors_are_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    for call in (
        lambda: importance_ratios(nested, nested, nested),
        lambda: logprob_gaps(nested, nested, nested, nested),
    ):
        with pytest.raises(InvalidField, match=r"logprobs='a nested tensor': padded or packed"):
            call()


def test_gaps_of_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidField, match="one shape for logprobs, behaviour, mask, versions"):
        logprob_gaps(PI, BEHAVIOUR[:1, :2], MASK, MASK)
