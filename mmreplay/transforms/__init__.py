"""What is computed from stored single steps when they are read."""
