"""Buffers to files of other formats and back, in blocks of rows.

`base` holds the protocol and `registry` the formats by name and suffix. Each format is
a module, whose library loads on first use; `buffer_reader` and `buffer_writer` make a
buffer one of them.
"""
