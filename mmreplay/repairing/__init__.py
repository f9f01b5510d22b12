"""The newest consistent state of a damaged buffer, in a new folder."""

from mmreplay.repairing.restore import DroppedRows, RepairReport, repair

__all__ = ["DroppedRows", "RepairReport", "repair"]
