"""A client of a run on Ray, over shards that are forked processes.

Without Ray it looks at nothing: `WITHOUT` says why, and a test skips with it.
"""

import multiprocessing
import pickle
import threading
from importlib.util import find_spec

import numpy as np

import mmreplay as mr
from tests.combinations.build import indices_of
from tests.combinations.compare import assert_steps, expected_step
from tests.combinations.consumers.delivery import as_arrays, others

WITHOUT = "" if find_spec("ray") else "Ray is not installed: see make ray"
RUN = "run"


def serve(connection, root, key):
    """Answer calls of a shard until the connection ends."""
    from mmreplay.ray.shard import Shard

    shard = Shard(RUN, str(root), key)
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, getattr(shard, method)(*arguments)
        except Exception as error:
            answer = False, error
        connection.send_bytes(pickle.dumps(answer))


class Answered:
    """A call that has its answer; see `mmreplay.ray.shard_calls.Call`."""

    def __init__(self, good, value, wanted=None):
        self.good, self.value, self.wanted = good, value, wanted

    def result(self, timeout_s):
        from mmreplay.ray.messages import reply_from_bytes
        from mmreplay.ray.reply_blocks import from_blocks

        if not self.good:
            raise self.value
        results = self.value if self.wanted is not None else [self.value]
        if isinstance(results[0], bytes):
            results = [reply_from_bytes(results[0]), *results[1:]]
        return results[0] if self.wanted is None else from_blocks(results, self.wanted)


class ForkedShard:
    """Calls to a shard in a forked process; see `ShardCalls` of the package."""

    def __init__(self, root, key):
        forking = multiprocessing.get_context("fork")
        self.key, self.lock = key, threading.Lock()
        self.connection, theirs = forking.Pipe()
        self.process = forking.Process(target=serve, args=(theirs, root, key))
        self.process.start()
        theirs.close()

    def send(self, method, *arguments):
        from mmreplay.ray.messages import client_to_bytes, request_to_bytes
        from mmreplay.ray.reply_blocks import num_blocks

        wanted = None
        if method == "exchange":
            client, updates, asked, highest = arguments
            request = request_to_bytes(updates, asked, highest)
            arguments = client_to_bytes(client), *request
            wanted = asked if num_blocks(asked) else None
        with self.lock:
            self.connection.send_bytes(pickle.dumps((method, arguments)))
            good, value = pickle.loads(self.connection.recv_bytes())
        return Answered(good, value, wanted)

    def settle(self):
        pass

    def close(self):
        self.connection.close()
        self.process.kill()
        self.process.join()


class ForkedRun:
    """A run of such shards; see `mmreplay.ray.shard_calls.RunCalls`."""

    def __init__(self, shards, node_id):
        self.run, self.node_id, self._shards = RUN, node_id, shards

    def shards(self):
        return self._shards


def client(built, rng):
    """Batches of two rings on two nodes are those of one large buffer."""
    if WITHOUT:
        return
    from mmreplay.ray.client import ReplayClient
    from mmreplay.ray.cluster import this_node_id

    every = others(built, 2)
    twins = [each.twin for each in every]
    legal = [twin.legal() for twin in twins]
    total = sum(map(len, legal))
    if not total:
        return
    shards = []
    try:
        for number, each in enumerate(every):
            root = built.new_path(f"node-{number}")
            (root / RUN).mkdir(parents=True)
            each.open().snapshot(root / RUN / f"ring-{number}")
            shards.append(ForkedShard(root, f"node{number}"))
        # Rows are read here, or arrive with the replies.
        node_id = "elsewhere" if rng.integers(2) else this_node_id()
        run = ForkedRun(shards, node_id)
        for sampler in (mr.UniformSampler(seed=1), mr.PrioritizedSampler(seed=1)):
            with ReplayClient(run, sampler, batch_size=9) as batches:
                for _, batch in zip(range(4), batches, strict=False):
                    check_batch(twins, legal, batch, batches.stats().rings)
                    np.testing.assert_allclose(
                        np.asarray(batch.probabilities), 1 / total, rtol=1e-5
                    )
    finally:
        for shard in shards:
            shard.close()


def check_batch(twins, legal, batch, rings):
    """Steps of a batch are legal starts of their rings, with all their values."""
    numbers = [int(ring.rpartition("-")[2]) for ring in rings]
    ids = [numbers[number] for number in batch.buffer_ids.tolist()]
    indices = indices_of(batch)
    assert all(index in legal[n] for n, index in zip(ids, indices, strict=True))
    steps = [expected_step(twins[n], p) for n, p in zip(ids, indices, strict=True)]
    assert_steps({p: as_arrays(a) for p, a in batch.fields.items()}, steps)


CONSUMERS = {"ReplayClient": client}
RARE = {"ReplayClient": 40}
