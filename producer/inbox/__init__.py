"""From the reply stream to whoever asked: reading, sorting, handing out and acknowledging outcomes."""

from .dropped import GAVE_UP, Dropped
from .features import FeatureCheck
from .handover import Crossing, HandOut, LeftLoops, calling_code, own_context, under_way
from .inbox import Inbox
from .news import News
from .outcomes import OPEN_STATES, Group, Handle, JobHandle, Outcome, as_failure, as_group
from .replies import ReplyReader
from .together import Together
from .tracked import FAILURE

__all__ = [
    "FAILURE",
    "GAVE_UP",
    "OPEN_STATES",
    "Crossing",
    "Dropped",
    "FeatureCheck",
    "Group",
    "HandOut",
    "Handle",
    "Inbox",
    "JobHandle",
    "LeftLoops",
    "News",
    "Outcome",
    "ReplyReader",
    "Together",
    "as_failure",
    "as_group",
    "calling_code",
    "own_context",
    "under_way",
]
