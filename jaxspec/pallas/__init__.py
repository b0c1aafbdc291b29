"""The operations of layers, one a file: `op` is called, `op_reference` specifies it.

Rules all of them keep. Index arrays are int32. Slot 0 and page 0 are null. A row or sequence is
live when its slot is positive and it has tokens; anything else is padding, reads something
harmless and writes nothing, whatever its indices hold. An operation takes the whole pool of all
layers and a Python int `layer`, and returns the pool, so that a donated pool is written in place.
"""
