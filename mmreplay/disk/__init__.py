"""The one door to the file system: raw calls, files, locks, and the pause of a ring."""
