"""What the files of a buffer say, as values: metadata.json and COMMIT."""
