"""Entry points of the processes that SGLang starts for one engine.

A spawned Python process unpickles its target before the arguments. So the child imports this module before anything of
SGLang. Here it closes the gaps of a host without a GPU (`worker/cpu_support.py`), and sets what torch must know before
it starts its threads. This module must not import SGLang at module level.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ....messages.model import StagingPolicy
from ...cpu_support import prepare_engine

prepare_engine()


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """What a child does before SGLang's own code runs. It happens when the child unpickles this object.

    The body of the target would be too late, because unpickling its arguments already imports SGLang.

    cpu: this engine computes on the CPU.
    threads: number for torch's operators, or None to let torch choose.
    quiet: no progress bars and no Python warnings on standard error.
    control: the folder where the scheduler of every rank listens. model: the engine's checkpoint.
    staging: whether a version is received beside the one that serves; see sync/tensors/staging.py.
    environment: variables as they were before SGLang's launch changed them; None for one that was not set.
    inside: variables for the child alone.
    tokenizer: path of the engine's tokenizer, "" for none.
    logit_processors: the operator's own, name -> "module:Class".
    deterministic: SGLang samples by seeds. routed_experts: it records which experts tokens go to.
    """

    cpu: bool = False
    threads: int | None = None
    quiet: bool = True
    control: str = ""
    model: str = ""
    staging: StagingPolicy = "auto"
    environment: dict[str, str | None] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    logit_processors: dict[str, str] = field(default_factory=dict)
    deterministic: bool = False
    routed_experts: bool = False

    def __reduce__(self) -> tuple[object, ...]:
        return (_set_up, (asdict(self),))


def restore_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process, or unset those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _before_imports() -> None:
    # Logprobs of the model's own distribution, before temperature and truncation. SGLang's sampler reads it at import.
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"


def _set_up(fields: dict[str, Any]) -> ChildSetup:
    setup = ChildSetup(**fields)
    restore_environment(setup.environment)
    os.environ.update(setup.inside)
    _before_imports()
    if setup.quiet:
        os.environ.setdefault("TQDM_DISABLE", "1")
        warnings.simplefilter("ignore")
    # By default progress bars share a named semaphore between processes, which a killed process leaves behind.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    return setup


def run_scheduler(
    server_args: object,
    port_args: object,
    gpu_id: int,
    tp_rank: int,
    *args: object,
    setup: ChildSetup,
    **kwargs: object,
) -> None:
    """SGLang's scheduler process. All arguments but `setup` are SGLang's."""
    from sglang.srt.managers.scheduler import run_scheduler_process  # noqa: PLC0415

    from .. import patches  # noqa: PLC0415 – all of these after SGLang
    from . import control, penalties, sampler, scheduler  # noqa: PLC0415

    patches.check("scheduler")
    scheduler.install(setup.tokenizer)
    penalties.install()
    sampler.install(server_args, setup.logit_processors)
    if setup.control:
        gpu = None if setup.cpu else gpu_id
        ranks = int(getattr(server_args, "tp_size", 1))
        control.listen(setup.control, rank=tp_rank, ranks=ranks, gpu=gpu, model=setup.model, staging=setup.staging)
    if setup.cpu:
        from . import cpu  # noqa: PLC0415

        cpu.own_attention(invariant=setup.deterministic)
        if setup.deterministic:
            cpu.invariant_products()
            cpu.seeded_sampling()
        if setup.routed_experts:
            cpu.recorded_experts()
    # So collections while the model loads do not walk the imports. Capturing CUDA graphs undoes this.
    gc.freeze()
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *args, **kwargs)
