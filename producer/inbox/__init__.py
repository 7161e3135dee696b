"""From the reply stream to whoever asked: reading, sorting, handing out and acknowledging outcomes."""

from .features import FeatureCheck
from .inbox import Inbox, as_failure
from .inboxes import Inboxes
from .news import News
from .outcomes import Group, JobHandle, Outcome, as_group
from .reader import ReplyReader

__all__ = [
    "FeatureCheck",
    "Group",
    "Inbox",
    "Inboxes",
    "JobHandle",
    "News",
    "Outcome",
    "ReplyReader",
    "as_failure",
    "as_group",
]
