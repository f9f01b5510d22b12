"""The newest consistent state of a damaged buffer, in a new folder."""

from mmreplay.moved import renamed
from mmreplay.repairing.restore import DroppedRows, RepairReport, repair

__all__ = ["DroppedRows", "RepairReport", "repair"]

__getattr__ = renamed(__name__, {"Cut": "DroppedRows", "Repaired": "RepairReport"})
