"""Weights from arrays in memory, by name: a `Checkpoint`, and their places in a loaded module."""
