"""``python -m mmreplay`` is the command ``mmreplay``."""

from mmreplay.cli import main

if __name__ == "__main__":
    main()
