"""The assembled product on one GPU, in one command: `python -m benchmarks.acceptance`."""
