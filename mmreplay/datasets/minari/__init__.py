"""Minari's datasets: a folder of metadata.json and episodes of T + 1 observations.

The folder is the dataset's (``~/.minari/datasets/<name>-v0``) or its ``data``. Spaces
and other metadata are kept as text, so that a dataset written again has them.
"""

from mmreplay.datasets.minari.reader import located as located
from mmreplay.datasets.minari.reader import open_reader as open_reader
from mmreplay.datasets.minari.reader import recognizes as recognizes
from mmreplay.datasets.minari.writer import open_writer as open_writer
from mmreplay.datasets.minari.writer import planned as planned
