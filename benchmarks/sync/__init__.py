"""`python -m benchmarks sync`: how fast weights get from a trainer into engines.

Each process of the benchmark, and each path of an update, has a file of its own.
"""
