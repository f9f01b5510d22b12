"""A rate limiter between the writer and the learners of one buffer, across processes.

The bound is Reverb's (Cassirer et al. 2021, "Reverb: A Framework For Experience
Replay", section 3.3): with I rows inserted, S items sampled and the ratio
r = samples_per_insert, keep

    r * min_size - error_buffer  <=  r * I - S  <=  r * min_size + error_buffer

The heads in COMMIT count the rows. Each learner counts the items that it draws in a
file of its own, under a lock that the system releases when the process dies. No process
holds a lock that another one waits for, so a dead process never blocks the others.

`RateLimiter` makes calls wait until the bound allows them. `RateCounter` counts in the
same files and says what the bound allows, but never waits.
"""

from mmreplay.limiter.rate_counter import RateCounter as RateCounter
from mmreplay.limiter.rate_limiter import RateLimiter as RateLimiter
