"""Recording: environments played into a buffer on disk.

A row holds what the policy saw, what it did, and what came of it. The observation
that followed an episode's last step goes into the buffer as its final row; what an
environment returns for a reset is never stored as a transition.
"""

from mmreplay.recording.recorder import RecordReport as RecordReport
from mmreplay.recording.recorder import record as record
