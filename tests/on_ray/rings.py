"""Rings, shards and clients of one process, for tests without a cluster."""

import pickle
import time

import numpy as np

import mmreplay as mr
from mmreplay.errors import FailedError
from mmreplay.ray.cluster import VERSION
from mmreplay.ray.descriptions import describe_sampler, describe_transforms
from mmreplay.ray.draws import ShardDraws, describe_client
from mmreplay.ray.epochs import freeze_rings
from mmreplay.ray.messages import (
    client_from_bytes,
    client_to_bytes,
    reply_from_bytes,
    reply_to_bytes,
    request_from_bytes,
    request_to_bytes,
)
from mmreplay.ray.reply_blocks import from_blocks, in_blocks, num_blocks
from mmreplay.ray.shard_calls import CallLostError, NotYetError

SCHEMA = mr.Schema({"n": mr.Field((), "int64")})


def ring(path, numbers, capacity=None, **options):
    """A closed ring of rows that hold these numbers."""
    capacity = max(1, len(numbers)) if capacity is None else capacity
    with mr.ReplayBuffer.create(path, SCHEMA, capacity, commit_every=None, **options) as buffer:
        if len(numbers):
            buffer.extend(n=np.asarray(numbers))
    return path


def client_of(sampler, transforms=()):
    """What a client draws by, as it travels."""
    return describe_client(describe_sampler(sampler), describe_transforms(transforms))


def update_of(positions, values):
    """Priorities of steps of environment 0."""
    return {
        "env_ids": np.zeros(len(positions), np.int64),
        "positions": np.asarray(positions, np.int64),
        "values": np.asarray(values, np.float32),
        "mask": None,
    }


def wanted_of(shares, step=0, key=0, rows=False):
    """What a request asks for."""
    shares = {name: np.asarray(own, np.float64) for name, own in shares.items()}
    return {"step": step, "key": key, "shares": shares, "rows": [*shares] * rows}


def as_travelled(results):
    """Results as Ray hands them over: copies, whose arrays cannot be written to."""
    results = pickle.loads(pickle.dumps(results))
    for block in results[1:]:
        for column in block.values():
            ragged = isinstance(column, mr.Ragged)
            for array in (column.values, column.offsets) if ragged else (column,):
                array.flags.writeable = False
    return results


class Shard:
    """A shard of this process, which answers when it is waited for.

    Attributes:
        key: Its node's.
        folders: Of its rings, by name.
        state: ``"alive"``; ``"silent"``: calls have no answer until it is alive again;
            ``"restarting"``: calls are lost; ``"slow"``: looks at a call find none, and
            waits do; ``"poisoned"``: it ends in each ``exchange``; ``"gone"``: no call
            can be made.
        calls: Methods called, in order.
        restarts: How often it was restarted.
        version: Of its mmreplay.
        node_id: Of its node.
    """

    def __init__(self, key, folders):
        self.key, self.folders = key, dict(folders)
        self.state, self.calls, self.restarts = "alive", [], 0
        self.version, self.node_id = VERSION, key
        self.draws = ShardDraws(lambda: dict(self.folders))

    def send(self, method, *arguments):
        """Begin a call."""
        if self.state == "gone":
            raise FailedError("not connected to a cluster any more")
        self.calls.append(method)
        return Call(self, method, arguments, self.state == "restarting")

    def settle(self):
        """Note that the client is closed."""
        self.calls.append("settle")

    def restart(self):
        """Lose all but the rings, and the calls that are under way."""
        self.restarts += 1
        state, self.state = self.state, "restarting"
        self.draws.close()
        self.draws = ShardDraws(lambda: dict(self.folders))
        self.state = state

    def info(self):
        """What the actor says of its rings."""
        rings = {}
        for name, folder in self.folders.items():
            with mr.ReplayBuffer.open(folder) as buffer:
                rings[name] = {
                    "path": str(folder),
                    "uuid": buffer.metadata.uuid.hex(),
                    "schema": buffer.schema.to_json(),
                    "roles": dict(buffer.schema.roles),
                }
        return {"error": None, "rings": rings, "version": self.version, "node_id": self.node_id}


class Call:
    """A call of a `Shard`, which runs when its result is asked for.

    Its answer stays what it was, as Ray's does: also where that is an error.
    """

    def __init__(self, shard, method, arguments, lost):
        self.shard, self.method, self.arguments = shard, method, arguments
        self.lost, self.reply, self.error = lost, None, None

    def result(self, timeout_s):
        """Run it once."""
        if self.error is not None:
            raise self.error
        if self.reply is not None:
            return self.reply
        restarts = self.shard.restarts
        if self.lost or self.shard.state == "restarting":
            raise CallLostError
        if self.shard.state == "silent":
            time.sleep(min(timeout_s, 0.01))
            raise NotYetError
        if self.shard.state == "slow" and not timeout_s:
            raise NotYetError
        if self.shard.state == "poisoned" and self.method == "exchange":
            raise CallLostError
        draws = self.shard.draws
        target = self.shard if self.method == "info" else draws
        try:
            if self.method == "exchange" and self.arguments[2] is not None:
                reply = self.exchange(draws, *self.arguments)
            else:
                reply = getattr(target, self.method)(*self.arguments)
        except Exception as error:
            if self.shard.restarts > restarts:
                # Restarted in the middle of it, which no answer outlives.
                raise CallLostError from None
            self.shard.calls.append("error")
            self.error = error
            raise
        if self.shard.restarts > restarts:
            # Draws that were closed meanwhile may have opened the rings again.
            draws.close()
            raise CallLostError
        self.reply = reply
        return reply

    def exchange(self, draws, client, updates, wanted, highest):
        """Draw as the actor does, by messages."""
        request = request_from_bytes(request_to_bytes(updates, wanted, highest))
        reply = draws.exchange(client_from_bytes(client_to_bytes(client)), *request)
        blocks = []
        if num_blocks(wanted):
            self.shard.calls.append("blocks")
            blocks = in_blocks(reply, wanted)[1:]
        answer, *blocks = as_travelled([reply_to_bytes(reply), *blocks])
        reply = reply_from_bytes(answer) if isinstance(answer, bytes) else answer
        return from_blocks([reply, *blocks], wanted) if blocks else reply


class Run:
    """A run of shards of this process.

    Attributes:
        said: What its registry says of the shards; None where it does not answer.
    """

    def __init__(self, *shards, key="elsewhere"):
        self.run, self.node_id = "test", key
        self.said = {}
        self.known = list(shards)

    def shards(self):
        """The shards that are known now."""
        return list(self.known)

    def states(self):
        """What the registry says of the shards."""
        return self.said

    def epoch_name(self, start, rank, token, lasts=False):
        """The name of a group of learners, once all shards answer."""
        away = [shard.key for shard in self.known if shard.state != "alive"]
        return {"name": "" if away else f"{start}/group", "away": away}

    def epoch(self, client, name, epoch):
        """Have the shards that answer freeze an epoch."""

        def ask(buffers):
            found, away = {}, []
            for shard in self.known:
                if shard.state == "alive":
                    found |= shard.draws.freeze(client, name, epoch, buffers)
                else:
                    away.append(shard.key)
            return found, away

        return freeze_rings(ask)

    def close(self):
        """Close the rings of all shards."""
        for shard in self.known:
            shard.draws.close()
