"""Caches on disk of traced and compiled programs, parallel tracing, and compile options."""

XLA_OPTIONS: dict[str, bool | int | str] = {
    # Keep all roundings to 16 bits. XLA would drop different ones in the fusions of each program,
    # and a request's results would depend on which programs ran it.
    "xla_allow_excess_precision": False,
    # Use cuBLAS for matmuls without a kernel of ours. XLA would compile dozens of Triton kernels to
    # choose from, for steps that are no faster (9B, 2,048 prompt tokens, H200: 61.0 ms with them,
    # 59.6 ms without).
    "xla_gpu_enable_triton_gemm": False,
    # Time cuBLAS's algorithms without comparing their results.
    "xla_gpu_autotune_level": 1,
}

# Loops run inside of CUDA graphs, as the rest of a step does. Otherwise the host waits for each
# iteration's condition and launches its kernels one by one. The option replaces XLA's default list,
# so it repeats that, and it overrides a list in XLA_FLAGS.
LOOP_OPTIONS = XLA_OPTIONS | {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    )
}
