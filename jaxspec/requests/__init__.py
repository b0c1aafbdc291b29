"""Requests: prompts, sampling parameters, their state on the host, and outputs. Imports no JAX."""
