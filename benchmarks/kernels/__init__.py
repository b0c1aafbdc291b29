"""One op at a time, beside its reference and public kernels."""
