"""The prefix cache: pages and states on the device, blocks on the host and on disk. No JAX."""
