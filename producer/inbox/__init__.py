"""From the reply stream to whoever asked: reading, sorting, handing out and acknowledging outcomes."""

from .features import FeatureCheck
from .inbox import Inbox, Inboxes, as_failure
from .news import News
from .outcomes import Group, Handle, JobHandle, Outcome, as_group
from .reader import ReplyReader

__all__ = [
    "FeatureCheck",
    "Group",
    "Handle",
    "Inbox",
    "Inboxes",
    "JobHandle",
    "News",
    "Outcome",
    "ReplyReader",
    "as_failure",
    "as_group",
]
