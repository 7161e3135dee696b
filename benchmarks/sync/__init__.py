"""`python -m benchmarks sync`: how fast weights get from a trainer into engines.

Many files: each process of the benchmark, and each path of an update, has its own.
"""
