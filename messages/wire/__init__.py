"""Bytes of a message: the frame, its bounds, and which kind of message each frame holds."""

from .codec import MAX_MESSAGE_BYTES, MINOR, decode, decode_one_of, encode
from .kinds import JOBS, RESULTS, Job, Result

__all__ = ["JOBS", "MAX_MESSAGE_BYTES", "MINOR", "RESULTS", "Job", "Result", "decode", "decode_one_of", "encode"]
