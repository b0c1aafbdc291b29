"""Ops called by model layers, and their Pallas kernels for Hopper GPUs (rules: `README.md`)."""
