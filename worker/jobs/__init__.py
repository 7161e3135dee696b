"""A job on a worker: decoded and checked, run sample by sample, turned into a result."""

from . import media
from .held import HeldJob, HeldJobs, as_result
from .intake import admit_all
from .legs import Leg
from .sample import SampleRun
from .task import Run

__all__ = ["HeldJob", "HeldJobs", "Leg", "Run", "SampleRun", "admit_all", "as_result", "media"]
