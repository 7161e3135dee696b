"""Checks that a LoRA adapter is one that engines can run: PEFT's configuration, and tensors under PEFT's names."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...messages.errors import InvalidField
from ..packing import PackedWeights

MOST_BYTES = 4 << 30
MOST_VERSION = (1 << 40) - 1
"""The highest version. The pool's scripts sort jobs by it; see `later_key` in lib_jobs.lua."""
CONFIG_BYTES = 64 << 10
PINNED = "rolloutmq_pinned"
"""A setting of ours beside PEFT's: workers keep this version when newer ones come."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
"""Setting -> allowed values. Engines ignore these settings. With other values they would sample from another model than
the trainer trains."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of an adapter. tensors: on the CPU and read-only, by PEFT's name. config: PEFT's configuration."""

    name: str
    version: int
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a PEFT adapter_config as plain JSON data: `r`, `lora_alpha`, `target_modules`, and its other settings.

    Sets become sorted lists, and enums become their values. Raises InvalidField for a setting that is missing or wrong,
    and for one that changes what the adapter computes and that engines ignore (DoRA, rsLoRA, aLoRA, rank patterns, …).
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(config), default=_plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField("config", str(error), "a PEFT adapter_config: plain data under names") from None
    if len(json.dumps(plain)) > CONFIG_BYTES:
        raise InvalidField("config", "…", f"at most {CONFIG_BYTES} bytes of JSON")
    plain.setdefault("peft_type", "LORA")
    if plain["peft_type"] != "LORA":
        raise InvalidField("config.peft_type", plain["peft_type"], "'LORA'")
    rank, alpha, targets = plain.get("r"), plain.get("lora_alpha"), plain.get("target_modules")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InvalidField("config.r", rank, "an integer of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (math.isfinite(alpha) and alpha > 0):
        raise InvalidField("config.lora_alpha", alpha, "a finite number above 0")
    named = isinstance(targets, list) and targets and all(isinstance(each, str) and each for each in targets)
    if not named and targets != "all-linear":
        raise InvalidField("config.target_modules", targets, "a list of module names, or 'all-linear'")
    for name, allowed in _PLAIN.items():
        if plain.get(name) not in allowed:
            raise InvalidField(f"config.{name}", plain[name], f"{allowed[0]!r}: the engine does not know it")
    return plain


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def check_tensors(config: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Check shapes and dtypes against a checked `config`. Raises InvalidField, which names the tensor.

    Every module of target_modules needs lora_A (r, inputs) and lora_B (outputs, r), both of a floating dtype. No other
    module may have tensors.
    """
    rank, targets = config["r"], config["target_modules"]
    sides: dict[str, set[str]] = {}
    for name, (shape, dtype) in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise InvalidField("tensors", name, "….lora_A.weight or ….lora_B.weight, as get_peft_model_state_dict says")
        module, side = found["module"], found["side"]
        if targets != "all-linear" and not any(module == each or module.endswith(f".{each}") for each in targets):
            raise InvalidField("tensors", name, f"of a module in target_modules={targets}")
        if len(shape) != 2 or 0 in shape or shape[0 if side == "A" else 1] != rank:
            wanted = f"({rank}, inputs)" if side == "A" else f"(outputs, {rank})"
            raise InvalidField(f"tensors[{name}].shape", tuple(shape), f"{wanted}, r being {rank}")
        if not dtype.is_floating_point:
            raise InvalidField(f"tensors[{name}].dtype", str(dtype), "a floating point type")
        sides.setdefault(module, set()).add(side)
    for module, there in sides.items():
        if there != {"A", "B"}:
            raise InvalidField("tensors", module, "both lora_A.weight and lora_B.weight")
    if not sides:
        raise InvalidField("tensors", "none", "lora_A.weight and lora_B.weight of at least one module")
    for each in () if targets == "all-linear" else targets:
        if not any(module == each or module.endswith(f".{each}") for module in sides):
            raise InvalidField("config.target_modules", each, "only modules that there are tensors of")


def pack(
    name: object,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    newest: Mapping[str, int],
    bucket_bytes: int,
    leader: bool,
) -> tuple[str, PackedWeights, dict[str, Any]]:
    """Copy an adapter into host memory. Returns its name, the copy, and its checked configuration.

    newest: adapter -> its newest version so far. leader: False on ranks that only take part in gathers.
    Raises InvalidField on every rank of a distributed trainer alike, and only after the last gather.
    """
    packed = PackedWeights(version, tensors, bucket_bytes, keep="host", leader=leader)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidField("name", name, "1 to 128 letters, digits, '_', '.', ':', '/', '-'")
    plain = check_config(config)
    check_tensors(plain, {place.name: (place.shape, place.dtype) for place in packed.places.tensors})
    if (nbytes := sum(packed.places.sizes)) > MOST_BYTES:
        raise InvalidField("tensors", f"{nbytes} bytes", f"at most {MOST_BYTES}")
    last = newest.get(name, 0)
    if isinstance(version, bool) or not isinstance(version, int) or not last < version <= MOST_VERSION:
        raise InvalidField("version", version, f"an integer above {last}, the newest one of adapter {name!r}")
    return name, packed, plain
