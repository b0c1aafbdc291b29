"""The layers models are built from.

A layer declares its parameters by shape and dtype, and `checkpoint(prefix)` says which published
tensor fills which part of which parameter: the names stand beside what they name.
"""
