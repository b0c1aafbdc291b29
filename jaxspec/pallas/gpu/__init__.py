"""GPU helpers that the kernels share: device sizes, memory accesses, register layouts, wgmma."""
