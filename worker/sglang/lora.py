"""Loads and unloads versions of LoRA adapters in SGLang.

SGLang knows adapters by unique names, and unloads one when no request refers to it any more. So every version is one of
SGLang's adapters, `<name>@<version>`, and versions live beside each other as long as requests need them.

Tensors are compared with the checkpoint before they are loaded. SGLang (seen in 0.5.17 and 0.5.23) accepts tensors that
do not fit its model; the scheduler dies when a request uses them. It ignores a lone k_proj, v_proj or up_proj. So what
SGLang computes as one (q, k and v; gate and up) is made complete with zeros.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...messages.errors import EngineError, InvalidField
from .wire import adapter_name, sglang_request

if TYPE_CHECKING:
    import torch

    from ...sync.adapters import Adapter

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Shapes = Mapping[str, tuple[int, ...]]


async def load(manager: Any, adapter: Adapter, *, model: str, tp_size: int) -> None:
    """Load one version while requests run. Does nothing if SGLang has it. Raises EngineError."""
    from ...sync.disk.checkpoint import checkpoint_shapes  # noqa: PLC0415 – torch

    try:
        tensors = complete(adapter, checkpoint_shapes(model))
    except InvalidField as error:
        raise EngineError(str(error)) from error
    # Tensors are pickled by value, each without the rest of its bucket. Only processes that this one started read them.
    payload = pickle.dumps({name: tensor.clone() for name, tensor in tensors.items()})
    name = adapter_name(adapter.name, adapter.version)
    if name in manager.lora_registry.get_all_adapters():
        return
    answer = await manager.load_lora_adapter_from_tensors(
        sglang_request(
            "LoadLoRAAdapterFromTensorsReqInput",
            lora_name=name,
            config_dict=adapter.config,
            serialized_named_tensors=[payload] * tp_size,
        ),
        None,
    )
    if not answer.success:
        raise EngineError(f"SGLang refused adapter {name}: {answer.error_message}")


async def unload(manager: Any, name: str, version: int) -> None:
    """Unload one version. Raises EngineError, also if requests still refer to it.

    SGLang would wait for those requests, under the lock that every other adapter's load needs.
    """
    loaded, registry = adapter_name(name, version), manager.lora_registry
    known = registry.get_all_adapters().get(loaded)
    if known is None:
        return
    if registry._counters[known.lora_id].value():
        raise EngineError(f"requests refer to adapter {loaded}")
    request = sglang_request("UnloadLoRAAdapterReqInput", lora_name=loaded)
    answer = await manager.unload_lora_adapter(request, None)
    if not answer.success:
        raise EngineError(f"SGLang did not unload adapter {loaded}: {answer.error_message}")
    manager.lora_ref_cache.pop(loaded, None)  # SGLang would keep it, to load it again from a path that is not there


def complete(adapter: Adapter, shapes: Shapes) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors, with zeros for modules that SGLang needs beside the adapter's own.

    shapes: the base model's weights, {} if they are not known. Raises InvalidField for tensors that do not fit them. If
    they are not known, an incomplete set is refused.
    """
    import torch  # noqa: PLC0415

    tensors = dict(adapter.tensors)
    modules = {name.rpartition(".lora_")[0]: name for name in tensors}
    known = any(_weight(module) in shapes for module in modules)
    for module, name in modules.items():
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        if known:
            base = shapes.get(_weight(module))
            if base is None:
                raise InvalidField("tensors", name, f"of modules of the model; it has no {_weight(module)}")
            if base != (made := (b.shape[0], a.shape[1])):
                raise InvalidField("tensors", name, f"of a module that is {base}; these make {made}")
        parent, _, leaf = module.rpartition(".")
        for group in FUSED:
            for other in group if leaf in group else ():
                missing = f"{parent}.{other}"
                if missing in modules or (known and _weight(missing) not in shapes):
                    continue
                if not known:
                    raise InvalidField("tensors", name, f"together with {missing}: there is no checkpoint to look at")
                rows, columns = shapes[_weight(missing)]
                rank = a.shape[0]
                tensors[f"{missing}.lora_A.weight"] = torch.zeros(rank, columns, dtype=a.dtype)
                tensors[f"{missing}.lora_B.weight"] = torch.zeros(rows, rank, dtype=b.dtype)
    return tensors


def _weight(module: str) -> str:
    return f"{module.removeprefix('base_model.model.')}.weight"
