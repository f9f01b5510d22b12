"""The thing itself: a buffer, opened to write or to read."""
