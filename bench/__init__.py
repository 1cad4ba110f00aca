"""Benchmarks: each prints its ceiling, its machine and the spread of at least three runs. `python -m bench` runs them all."""
