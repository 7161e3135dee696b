"""`queue`, `idle` and `shards` of `python -m benchmarks`: other queues, what waiting costs, several Redis."""
