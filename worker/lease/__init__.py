"""What a worker holds and for how long: heartbeats, claims, saving, publishing, handing back."""

from .claims import ClaimLoop
from .deadlines import Deadlines
from .handback import Handback
from .heartbeat import Membership, Pace
from .outbox import Outbox
from .saving import Checkpoints, Streaming

__all__ = ["Checkpoints", "ClaimLoop", "Deadlines", "Handback", "Membership", "Outbox", "Pace", "Streaming"]
