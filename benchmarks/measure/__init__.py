"""What the benchmarks measure with, and the shapes they measure."""
