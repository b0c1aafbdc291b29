"""Norms, and the residual stream that they add to."""
