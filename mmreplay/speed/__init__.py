"""How fast a buffer can be drawn from on this machine, and what would be faster.

Draws are *warm* where their rows are in memory, and *cold* where the disk is asked for
every one of them.
"""

from mmreplay.speed.measuring import measure_speed as measure_speed
from mmreplay.speed.report import Rate as Rate
from mmreplay.speed.report import SpeedReport as SpeedReport
