"""The benchmarks; `python -m benchmarks.<room>.<name> --help` says what each measures."""
