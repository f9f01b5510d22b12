"""Benchmarks: each asks one question, against its peers, in one run.

Run them as ``python -m tools.bench.bench_add`` and so on; docs/benchmarks.md says
how to make the environment that holds the peers, and what was printed.
"""
