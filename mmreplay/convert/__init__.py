"""Buffers to files of other formats and back, in blocks of rows.

`base` holds the protocol, `registry` the formats by name and suffix, `rows` a buffer
as one of them. Each format is a module of its own; its library loads on first use.
"""
