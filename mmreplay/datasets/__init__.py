"""Public datasets of reinforcement learning as sources, and some as targets.

Each module or folder knows the files of one library. `common` makes rows of a buffer
from their steps; `hdf5`, `arrow`, `images`, `pickles` and `torch_files` read files of a
kind. The report of each conversion says what was read and what was left out.
"""
