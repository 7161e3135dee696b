"""A LoRA adapter from a folder, as PEFT's `save_pretrained` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from ...messages.errors import InvalidField
from ..disk import BrokenSnapshot, NoSuchSnapshot, disk_errors
from .format import CONFIG_BYTES, MOST_BYTES, Adapter, check_config, check_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def read_adapter(folder: Path, name: str, version: int) -> Adapter:
    """Read and check a folder's configuration and tensors. The tensors are on the CPU.

    Raises NoSuchSnapshot if a file is missing, BrokenSnapshot if one cannot be read, and InvalidField for an adapter
    that engines cannot run.
    """
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    config, tensors = folder / CONFIG, folder / TENSORS
    with disk_errors("reading", folder):
        for file, most in ((config, CONFIG_BYTES), (tensors, MOST_BYTES)):
            if not file.is_file():
                raise NoSuchSnapshot(f"{file} is not there: PEFT's save_pretrained writes {CONFIG} and {TENSORS}")
            if (nbytes := file.stat().st_size) > most:
                raise InvalidField("path", f"{file.name} of {nbytes} bytes", f"at most {most}")
        try:
            told = check_config(dict(json.loads(config.read_bytes())))
            found = load_file(tensors)
        except (ValueError, TypeError, SafetensorError) as error:
            raise BrokenSnapshot(f"{folder}: {error}") from error
    check_tensors(told, {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in found.items()})
    return Adapter(name, version, told, found)
