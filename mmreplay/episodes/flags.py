"""The flags of rows: where episodes begin and end, and nothing else says so."""

START = 1
TERMINATED = 2
TRUNCATED = 4
FINAL = 8
BREAK = 16
CUT = 32
"""The step before this row is reported as truncated (``on_resume="truncate"``)."""
END = TERMINATED | TRUNCATED
ALL_FLAGS = 63
