"""A rate limiter between the writer and the learners of one buffer, across processes.

Reverb's law (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section
3.3): with I rows inserted, S items sampled and the ratio r = samples_per_insert, keep

    r * min_size - error_buffer  <=  r * I - S  <=  r * min_size + error_buffer

Rows are counted by the heads in COMMIT; each learner counts what it draws in a file of
its own, under a lock that dies with it. Nobody holds anything that another waits for
but the law itself, so that a dead process can stop nobody for ever.
"""

from mmreplay.limiter.law import RateLimiter as RateLimiter
