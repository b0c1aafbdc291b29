"""Models in GGUF files: metadata as a config.json, tensors by their names on the hub.

"On the hub" means in the safetensors checkpoint that the file was converted from.
"""

REMEDY = "Download the file again, convert it anew, or use the folder of its safetensors."
"""Remedy in all errors about a file's metadata or tensors."""
