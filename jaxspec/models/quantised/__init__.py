"""Quantised checkpoint folders: FP8, NVFP4, MXFP4 and integers of 4 or 8 bits with scales.

    quantization_config ─▶ Scheme ─┐
                                   ├─▶ matrices_in: a `Matrix` per weight ─▶ QuantisedCheckpoint
    names, dtypes and shapes ──────┘

A weight's own tensors decide how it is stored, so a folder may mix formats with 16-bit weights.
"""
