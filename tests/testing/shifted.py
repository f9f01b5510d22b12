"""A format that breaks one rule: npz files whose values are read from the next row."""

from mmreplay.convert import npz
from mmreplay.convert.base import Block

open_writer = npz.open_writer


def open_reader(path):
    reader = npz.open_reader(path)
    blocks = reader.blocks

    def shifted(rows_per_block=None):
        for block in blocks(rows_per_block):
            columns = dict(block.columns)
            for name in reader.describe().schema.varying:
                rows = [*range(1, len(block)), 0]
                columns[name] = block.values(name)[rows]
            yield Block(columns, block.env_ids, block.positions, block.flags)

    reader.blocks = shifted
    return reader
