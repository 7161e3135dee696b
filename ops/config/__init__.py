"""Settings of workers, engines, jobs and publishers: from one file (ours, SkyRL's or VERL's), environment and flags."""

from .document import read_document
from .load import explain, load_settings
from .settings import Settings
from .sources import worker_flags
from .translate import Explained

__all__ = ["Explained", "Settings", "explain", "load_settings", "read_document", "worker_flags"]
