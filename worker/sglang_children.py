"""Entry points of the processes that SGLang starts for one engine.

Spawned Python processes unpickle their target before its arguments, so this module is imported in the child before
anything of SGLang is: the place to close the gaps of a CPU-only host (:mod:`.cpu_support`) and to set what has to be
set before torch starts its threads. It must not import sglang itself at module level.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
import warnings
from dataclasses import dataclass

import torch

from .cpu_support import prepare_engine

prepare_engine()


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """What a child does before SGLang's own code runs: at the moment in which it unpickles this object.

    The target's own body would be too late, because unpickling its arguments already imports SGLang.

    cpu: this engine computes on the CPU.
    threads: for torch's operators, or None for as many as torch chooses.
    quiet: no progress bars and no Python warnings on standard error.
    """

    cpu: bool = False
    threads: int | None = None
    quiet: bool = True

    def __reduce__(self) -> tuple[object, ...]:
        return (_set_up, (self.cpu, self.threads, self.quiet))


def _set_up(cpu: bool, threads: int | None, quiet: bool) -> ChildSetup:
    # The model's own distribution: before temperature and truncation. Read when SGLang's sampler is imported.
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    if quiet:
        os.environ.setdefault("TQDM_DISABLE", "1")
        warnings.simplefilter("ignore")
    # By default progress bars share a named semaphore between processes, which a killed process leaves behind.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    if threads is not None:
        torch.set_num_threads(threads)
    return ChildSetup(cpu, threads, quiet)


def run_scheduler(*args: object, setup: ChildSetup, **kwargs: object) -> None:
    """SGLang's scheduler process. The other arguments are SGLang's."""
    from sglang.srt.managers.scheduler import run_scheduler_process  # noqa: PLC0415

    if setup.cpu:
        from .cpu_attention import install  # noqa: PLC0415

        install()
        # On a CPU SGLang's "empty the device's cache" is a full garbage collection, after every weight update and now
        # and then when idle. Half a second, if it walks all that was imported until now; a few milliseconds if not.
        gc.freeze()
    run_scheduler_process(*args, **kwargs)
