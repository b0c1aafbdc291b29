"""Ops that layers call, and their kernels for Hopper GPUs; `README.md` has the rules of both."""
