"""`python -m benchmarks queue`, `bench idle` and `bench shards`: other queues, what waiting costs, several Redis."""
