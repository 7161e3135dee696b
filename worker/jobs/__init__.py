"""A job on a worker: decoded and checked, run sample by sample, turned into a result."""

from . import media
from .held import HeldJob, HeldJobs, as_result, text_with_calls
from .intake import MustFetch, admit_all, admit_fetched
from .legs import Leg
from .sample import SampleRun
from .task import Run

__all__ = [
    "HeldJob",
    "HeldJobs",
    "Leg",
    "MustFetch",
    "Run",
    "SampleRun",
    "admit_all",
    "admit_fetched",
    "as_result",
    "media",
    "text_with_calls",
]
