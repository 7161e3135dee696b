"""SGLang and transformers on a host without a GPU, from published wheels.

Two gaps stand between a CPU build of torch and `import sglang`:

- torchvision's published wheel carries C++ operators that cannot load beside a CPU torch, and `import torchvision`
  (which transformers does) then fails while it registers fakes for `torchvision::nms`. Defining the two operators first
  is enough; nothing here ever calls them.
- on a CPU SGLang imports a few names from `sgl_kernel`, whose CPU build is not published. The torch_native path never
  calls them, so a stand-in module does; a real `sgl_kernel` is used where there is one.

Both live in the interpreter, so each process needs them before its first `import transformers` or `import sglang`.
`multiprocessing` starts SGLang's own processes by the spawn method, which unpickles the target function before its
arguments. That target is in `worker/sglang/inside/entry.py`, which calls :func:`prepare_engine` before anything of
SGLang is imported there. So site-packages stay as they are, and no other Python program that a worker starts is
touched, as it would be by a `sitecustomize` on PYTHONPATH.

Nothing here does anything where there is a GPU. This module imports no SGLang; a trainer may use it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_KEEP_ALIVE: list[Any] = []
_TORCHVISION_OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

_QWEN3_5_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""SGLang's model of Qwen3.5 looks these up when it is imported, and the processor of all Qwen-VL models imports it.

Each other name must stay unknown: SGLang takes a path on a CPU by which ones there are.
"""


def gpu_found() -> bool:
    """Whether torch sees a GPU of any kind in this process."""
    return bool(torch.cuda.is_available()) or (hasattr(torch, "xpu") and bool(torch.xpu.is_available()))


def prepare_transformers() -> None:
    """Make `import transformers` work beside a CPU build of torch and a published torchvision.

    Call it before the first import of transformers or torchvision; calling it again does nothing.
    """
    if gpu_found() or _KEEP_ALIVE or "torchvision" in sys.modules:
        return
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _own_operators_load(Path(found.origin).parent):
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _TORCHVISION_OPERATORS.values():
        library.define(schema)
    _KEEP_ALIVE.append(library)  # a library that is collected takes its operators with it


def prepare_engine() -> None:
    """Make `import sglang` choose and survive its CPU path, in this process and in those it starts.

    Call it before the first import of sglang; calling it again does nothing.
    """
    prepare_transformers()
    if gpu_found():
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _stand_in("sgl_kernel")
        operators = torch.library.Library("sgl_kernel", "DEF")
        for operator in _QWEN3_5_OPERATORS:
            operators.define(f"{operator}(Tensor x) -> Tensor")
        _KEEP_ALIVE.append(operators)


def share_cores(ranks: int) -> None:
    """Let `ranks` tensor-parallel ranks share the cores of this host.

    SGLang otherwise wants a NUMA node for each. Its own variable, where it is set, wins. Only a real `sgl_kernel` pins
    threads to these cores; the torch_native path just counts them.
    """
    cores = range(os.cpu_count() or 1)
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([f"{cores[0]}-{cores[-1]}"] * ranks))


def _own_operators_load(package: Path) -> bool:
    """Whether torchvision's own operators load here, as they do where torchvision was built for a CPU torch."""
    for binary in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(binary))
        except OSError:
            return False
    # A build that carries no such binary registers its operators by other means, or not at all; and not each has qnms.
    return hasattr(torch.ops.torchvision, "nms")


def _stand_in(name: str) -> types.ModuleType:
    """A module that has every public name; each is a function that raises NotImplementedError when called."""
    module = types.ModuleType(name, "Stands in for the CPU build of sgl_kernel, which is not published.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)

    def missing(attribute: str) -> Callable[..., Any]:
        if attribute.startswith("_"):
            raise AttributeError(attribute)

        def stub(*_args: object, **_kwargs: object) -> Any:
            raise NotImplementedError(f"{name}.{attribute} needs the real {name}; this host runs SGLang without it")

        stub.__name__ = attribute
        return stub

    setattr(module, "__getattr__", missing)  # noqa: B010  (mypy refuses the plain assignment)
    return module
