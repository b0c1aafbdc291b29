"""Keys and values in pages: where a token's go, and the copies that kernels share."""
