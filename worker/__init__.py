"""The worker: one engine in a pool. Names are imported when they are used, so this loads neither torch nor SGLang.

Many files: `worker` puts the rooms together, and each of the others is one thing that it does besides: moves, leaving,
slots, the journal.

For a trainer: `prepare_transformers`, which makes `import transformers` work beside a CPU build of torch. For whoever
embeds a worker in a program of their own: `Worker`, `WorkerConfig`, `run_worker`, and `ScriptedEngine` for tests.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .config import WorkerConfig
    from .cpu_support import prepare_transformers
    from .main import run_worker
    from .scripted import ScriptedEngine
    from .worker import Worker

__all__ = ["ScriptedEngine", "Worker", "WorkerConfig", "prepare_transformers", "run_worker"]
__getattr__, __dir__ = lazy(__name__, __all__, ".config", ".scripted", ".worker", ".main", ".cpu_support")
