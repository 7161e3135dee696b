"""`rolloutmq bench queue`: the queue beside other queues on the same Redis."""

__all__ = []
