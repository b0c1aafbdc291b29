"""Layers that models are built from.

A layer declares its parameters by shape and dtype; its `checkpoint(prefix)` maps tensors of the
checkpoint to parts of these parameters.
"""
