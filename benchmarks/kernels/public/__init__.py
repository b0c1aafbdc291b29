"""Public kernels that do what ours do."""
