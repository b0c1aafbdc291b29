"""What the kernels share of the GPU: its sizes, accesses, register layouts and tensor cores."""
