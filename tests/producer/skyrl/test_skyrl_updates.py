"""The forms in which SkyRL's releases say what an update brings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rolloutmq.messages import InvalidField
from rolloutmq.producer.skyrl.incoming import read_update

HANDLE = {"GPU-1": (print, ())}


@dataclass
class CudaIpcWeightUpdateRequest:
    """As newer SkyRL has it: all tensors in one buffer."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sizes: list[int] = field(default_factory=list)
    ipc_handles: dict[str, Any] = field(default_factory=dict)


def test_one_handle_for_all() -> None:
    request = CudaIpcWeightUpdateRequest(["a", "b"], ["bf16"] * 2, [[2, 3], [4]], [6, 4], HANDLE)
    update = read_update(request)
    assert (update.way, update.packed, update.sizes, update.handles) == ("ipc", True, (6, 4), (HANDLE,))
    assert (update.names, update.dtypes, update.shapes) == (("a", "b"), ("bfloat16", "bfloat16"), ((2, 3), (4,)))
    extras = {"names": ["a"], "dtypes": ["float"], "shapes": [[1]], "sizes": [1], "packed": True}
    assert read_update(extras | {"extras": [{"ipc_handles": HANDLE}]}).packed


def test_a_handle_each() -> None:
    update = read_update(
        {"names": ["a", "b"], "dtypes": ["half"] * 2, "shapes": [[1]] * 2, "extras": [{"ipc_handles": HANDLE}] * 2}
    )
    assert (update.way, update.packed, len(update.handles), update.dtypes[0]) == ("ipc", False, 2, "float16")
    update = read_update({"names": ["a"], "dtypes": [torch.float32], "shapes": [torch.Size([2])], "extras": None})
    assert (update.way, update.dtypes, update.shapes) == ("broadcast", ("float32",), ((2,),))


def test_tensors_say_what_they_are() -> None:
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    for request in (
        {"names": ["a"], "tensors": [tensor]},
        {"names": ["a"], "extras": [{"tensor": tensor}]},
    ):
        update = read_update(request)
        assert (update.way, update.dtypes, update.shapes) == ("tensors", ("bfloat16",), ((2, 3),))
        assert update.tensors[0] is tensor


@pytest.mark.parametrize(
    ("request_", "field_"),
    [
        ("text", "request"),
        ({}, "names"),
        ({"names": "a"}, "names"),
        ({"names": ["a"], "dtypes": ["float32"], "shapes": [["x"]]}, "shapes"),
        ({"names": ["a"], "dtypes": ["float32"], "shapes": [[-1]]}, "shapes"),
        ({"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "weights": []}, "weights"),
        (CudaIpcWeightUpdateRequest(["a"], ["float32"], [[2]], [3], HANDLE), "sizes"),
        (CudaIpcWeightUpdateRequest(["a"], ["float32"], [[2]], [], HANDLE), "sizes"),
        (CudaIpcWeightUpdateRequest(["a", "b"], ["float32", "half"], [[2]] * 2, [2, 2], HANDLE), "dtypes"),
        (
            {"names": ["a"], "tensors": [torch.ones(1)], "extras": [{"ipc_handles": HANDLE}]},
            "extras",
        ),
        ({"names": ["a"], "tensors": [torch.ones(1)] * 2}, "tensors"),
        ({"names": ["a"], "tensors": [torch.ones(1)], "dtypes": ["float32"], "shapes": [[2]]}, "shapes"),
    ],
)
def test_what_is_wrong_is_named(request_: Any, field_: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_update(request_)
    assert caught.value.field == field_
