"""WHO runs: picks requests, gives out pages and slots. NumPy and plain Python, no JAX."""
