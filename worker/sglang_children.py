"""Entry points of the processes that SGLang starts for one engine.

Spawned Python processes unpickle their target before its arguments, so this module is imported in the child before
anything of SGLang is: the place to close the gaps of a CPU-only host (:mod:`.cpu_support`) and to set what has to be
set before torch starts its threads. It must not import sglang itself at module level.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from dataclasses import dataclass

from .cpu_support import prepare_engine

prepare_engine()


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """What a child does before SGLang's own code runs.

    cpu: this engine computes on the CPU.
    threads: for torch's operators, or None for as many as torch chooses.
    quiet: no progress bars and no Python warnings on standard error.
    """

    cpu: bool = False
    threads: int | None = None
    quiet: bool = True

    def apply(self) -> None:
        import torch  # noqa: PLC0415

        # By default progress bars share a named semaphore between processes, which a killed process leaves behind.
        importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
        if self.quiet:
            os.environ.setdefault("TQDM_DISABLE", "1")
            warnings.simplefilter("ignore")
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def run_scheduler(*args: object, setup: ChildSetup, **kwargs: object) -> None:
    """SGLang's scheduler process, after `setup`. The other arguments are SGLang's."""
    setup.apply()
    # The model's own distribution: before temperature and truncation. Read when the sampler is imported.
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    from sglang.srt.managers.scheduler import run_scheduler_process  # noqa: PLC0415

    if setup.cpu:
        from .cpu_attention import install  # noqa: PLC0415

        install()
    run_scheduler_process(*args, **kwargs)
