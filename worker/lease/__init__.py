"""What a worker holds and for how long: heartbeats, claims, saving, publishing, handing back."""

from .admission import Admission
from .claims import ClaimLoop
from .deadlines import Deadlines
from .handback import Handback
from .heartbeat import Membership
from .memberships import Memberships
from .outbox import Outbox
from .results import Results
from .saving import Saving

__all__ = [
    "Admission",
    "ClaimLoop",
    "Deadlines",
    "Handback",
    "Membership",
    "Memberships",
    "Outbox",
    "Results",
    "Saving",
]
