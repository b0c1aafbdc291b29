"""The options that XLA compiles every step with."""

XLA_OPTIONS: dict[str, bool | int] = {
    # Roundings to 16 bits are kept. XLA would drop some inside its fusions, others in each program,
    # and a request's numbers would depend on which programs ran it.
    "xla_allow_excess_precision": False,
    # cuBLAS multiplies what no kernel of ours does. XLA would compile dozens of Triton kernels
    # beside it to choose from, for steps that are no faster (9B, 2,048 prompt tokens, H200: 61.0 ms
    # with them, 59.6 ms without).
    "xla_gpu_enable_triton_gemm": False,
    # cuBLAS's algorithms are timed, and their results not compared.
    "xla_gpu_autotune_level": 1,
}
