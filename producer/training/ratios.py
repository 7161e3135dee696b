"""Importance ratios between the weights that train and those that sampled, and how far both are apart. Imports torch.

Tensors are of one shape, (b, t) or packed (N,), with each value at its token's place, as in RolloutBatch.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from ...messages.errors import InvalidField

Level = Literal["token", "sequence", "geometric"]


def importance_ratios(
    logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, level: Level = "token"
) -> torch.Tensor:
    """pi / mu at generated tokens, 0 at others; the shape of `logprobs`, which are pi's. behaviour: mu's.

    level: "token": of each token. "sequence": of a row's tokens together, the product. "geometric": that product's root
    of the number of tokens, as in GSPO (Zheng et al. 2025, arXiv:2507.18071). The latter two are for (b, t) only; each
    generated token of a row has the row's ratio. Ratios keep the gradient of `logprobs`. They are finite: one that the
    dtype has no number for is nearly its largest one, without a gradient. Raises InvalidField.
    """
    if level not in get_args(Level):
        raise InvalidField("level", level, '"token", "sequence" or "geometric"')
    _check_shapes(logprobs=logprobs, behaviour=behaviour, mask=mask)
    here = mask.bool()
    gaps = torch.where(here, logprobs - behaviour, 0.0)
    if level != "token":
        if gaps.ndim != 2:
            raise InvalidField("level", level, '"token" for tensors that are not (b, t)')
        gaps = gaps.sum(1, keepdim=True)
        if level == "geometric":
            gaps = gaps / here.sum(1, keepdim=True).clamp(min=1)
        gaps = gaps.expand_as(logprobs)
    # Infinity times the 0 with which `truncated` and `masked` answer it would be a gradient of NaN.
    largest = math.log(torch.finfo(gaps.dtype).max) - 1
    return torch.where(here, gaps.clamp(max=largest).exp(), 0.0)


def truncated(ratios: torch.Tensor, most: float = 2.0) -> torch.Tensor:
    """Truncated importance sampling (TIS): ratios above `most` count as `most`. Ionides 2008 (J. Comput. Graph. Stat.
    17:2); for policy gradients IMPALA, Espeholt et al. 2018, arXiv:1802.01561. Raises InvalidField."""
    if not most > 0:
        raise InvalidField("most", most, "above 0")
    return ratios.clamp(max=most)


def masked(ratios: torch.Tensor, least: float = 0.5, most: float = 2.0) -> torch.Tensor:
    """Masked importance sampling (MIS): ratios outside [least, most] count as 0, so their tokens teach nothing. IcePop
    does so with tokens (Ling Team 2025, arXiv:2510.18855). Raises InvalidField."""
    if not 0 <= least < most:
        raise InvalidField("least", least, f"at least 0 and below most={most}")
    return torch.where((ratios >= least) & (ratios <= most), ratios, 0.0)


def logprob_gaps(
    logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, versions: torch.Tensor
) -> dict[int, dict[str, Any]]:
    """How far the trainer's log-probabilities are from the sampler's, by the version that sampled.

    With the weights of that very version the gap is what engine and trainer compute differently; with newer weights
    there is the policy's change in it. Of each version: tokens, mean and max of |gap|, the mean ratio (1 on policy),
    and kl, the mean of ratio - 1 - log ratio over tokens: an estimate of KL(mu | pi) that is never negative (Schulman
    2020, "Approximating KL divergence"). Raises InvalidField.
    """
    _check_shapes(logprobs=logprobs, behaviour=behaviour, mask=mask, versions=versions)
    here = mask.bool()
    gaps, sampled_by = (logprobs - behaviour).detach()[here].double(), versions[here]
    report: dict[int, dict[str, Any]] = {}
    for version in sampled_by.unique().tolist():
        gap = gaps[sampled_by == version]
        ratio = gap.exp()
        report[int(version)] = {
            "tokens": len(gap),
            "mean": float(gap.abs().mean()),
            "max": float(gap.abs().max()),
            "ratio": float(ratio.mean()),
            "kl": float((ratio - 1 - gap).mean()),
        }
    return report


def _check_shapes(**tensors: torch.Tensor) -> None:
    """Raises InvalidField unless all are of one shape, and none is nested: jagged tensors lack what is needed here."""
    for name, tensor in tensors.items():
        if tensor.is_nested:
            raise InvalidField(name, "a nested tensor", 'padded or packed: RolloutBatch.of(rows, "packed") packs rows')
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise InvalidField("shapes", shapes, f"one shape for {', '.join(shapes)}")
