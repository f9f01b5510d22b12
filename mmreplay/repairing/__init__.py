"""The newest consistent state of a damaged buffer, in a new folder."""

from mmreplay.repairing.restore import Cut, Repaired, repair

__all__ = ["Cut", "Repaired", "repair"]
