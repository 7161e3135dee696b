"""From the reply stream to whoever asked: reading, sorting, handing out and acknowledging outcomes."""

from .features import FeatureCheck
from .handover import Crossing, HandOut, LeftLoops, calling_code, own_context, under_way
from .inbox import Inbox
from .inboxes import Inboxes
from .news import News
from .outcomes import OPEN_STATES, Group, Handle, JobHandle, Outcome, as_failure, as_group
from .reader import ReplyReader
from .sharded_reader import reader_of

__all__ = [
    "OPEN_STATES",
    "Crossing",
    "FeatureCheck",
    "Group",
    "HandOut",
    "Handle",
    "Inbox",
    "Inboxes",
    "JobHandle",
    "LeftLoops",
    "News",
    "Outcome",
    "ReplyReader",
    "as_failure",
    "as_group",
    "calling_code",
    "own_context",
    "reader_of",
    "under_way",
]
