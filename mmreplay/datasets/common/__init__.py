"""Code that the readers and writers of several datasets share.

- `rows`: columns of a source, read a range of rows at a time
- `fragments`: rows of a buffer from consecutive steps
- `fields`: the schema of columns, and the columns that mark episode ends
- `transitions`: steps with their next observations, for targets that store those
"""
