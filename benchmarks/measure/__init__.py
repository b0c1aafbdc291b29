"""Measurements that the benchmarks share, and the shapes they run."""
