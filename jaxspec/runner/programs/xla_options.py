"""The options that XLA compiles every step with."""

XLA_OPTIONS: dict[str, bool | int] = {
    # Roundings to 16 bits are kept. XLA would drop some inside its fusions, others in each program,
    # and a request's numbers would depend on which programs ran it.
    "xla_allow_excess_precision": False,
    # cuBLAS multiplies what no kernel of ours does, by the algorithms that it chooses itself. To
    # try many of them takes the GPU from the rows that run, up to a second at a time, and takes
    # half of the seconds of compiling; which one wins differs from start to start.
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": 0,
}
