"""Where episodes begin and end: the flags of rows, and the index built from them.

The flags are the only truth of boundaries. An episode starts at a row with START
and takes in the rows up to the next START. Its steps are those rows less the
*final row*, which holds the observation that followed the last step.
"""

from mmreplay.episodes.flags import ALL_FLAGS as ALL_FLAGS
from mmreplay.episodes.flags import BREAK as BREAK
from mmreplay.episodes.flags import CUT as CUT
from mmreplay.episodes.flags import END as END
from mmreplay.episodes.flags import FINAL as FINAL
from mmreplay.episodes.flags import START as START
from mmreplay.episodes.flags import TERMINATED as TERMINATED
from mmreplay.episodes.flags import TRUNCATED as TRUNCATED
from mmreplay.episodes.index import EnvironmentEpisodes as EnvironmentEpisodes
from mmreplay.episodes.index import EpisodeIndex as EpisodeIndex
from mmreplay.episodes.index import FlagReader as FlagReader
from mmreplay.episodes.rules import fold_table as fold_table
from mmreplay.episodes.rules import legal_start_table as legal_start_table
