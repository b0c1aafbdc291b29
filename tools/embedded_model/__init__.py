"""Trains, checks and exports the small Qwen3.5-architecture model bundled in `jaxspec/embedded`."""
