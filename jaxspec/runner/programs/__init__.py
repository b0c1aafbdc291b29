"""The caches on disk that make a start quick: compiled programs, and those JAX would trace."""
