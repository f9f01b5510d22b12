"""The field's datasets as sources: files that others defined, episode by episode.

`stretches` makes rows of steps with their next observations; each other module knows
one kind of file, and says in the report what it found and left out.
"""
