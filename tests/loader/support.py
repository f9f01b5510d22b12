"""A buffer whose steps are numbered, and the datasets and checks over it."""

import numpy as np
from torch.utils.data import DataLoader

import mmreplay as mr

SIZE = 64
"""Of the batches of `draws_of`."""

FIELDS = {
    "observation": {"number": mr.Field((), "int64"), "pixels": mr.Field((64, 65), "uint8")},
    "action": mr.Field((3,), "float32"),
    "brain": mr.Field((2,), "bfloat16"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


def steps(first, count, num_envs=2, length=7):
    """Steps ``[count, num_envs]`` numbered by position * num_envs + env_id."""
    positions = np.arange(first, first + count)
    number = positions[:, None] * num_envs + np.arange(num_envs)
    # Environments end at different positions, by both kinds of end.
    place = positions[:, None] + 3 * np.arange(num_envs)
    return {
        "observation": {
            "number": number,
            "pixels": np.broadcast_to(
                (number % 251).astype(np.uint8)[..., None, None], (*number.shape, 64, 65)
            ),
        },
        "action": np.stack([number, -number, number * 2], -1).astype(np.float32),
        "brain": np.zeros((*number.shape, 2), np.uint16),
        "terminated": place % (2 * length) == length - 1,
        "truncated": place % (2 * length) == 2 * length - 1,
    }


def fill(path, count=200, capacity=100, num_envs=2, close=True, **options):
    """A buffer of numbered steps, wrapped where count is above the capacity."""
    options.setdefault("autoreset", "disabled")
    options.setdefault("commit_every", None)
    buffer = mr.ReplayBuffer.create(path, mr.Schema(FIELDS), capacity, num_envs, **options)
    buffer.extend(steps(0, count, num_envs))
    if close:
        buffer.close()
    return buffer


def draws_of(path, seed=0):
    """A dataset, and batches of its items in a shuffled order."""
    dataset = mr.ReplayDataset(path)
    return dataset, dataset.draws(mr.ShuffledSampler(seed=seed), SIZE)


def loader_of(dataset, draws, workers=0):
    """torch's loader of such batches."""
    return DataLoader(dataset, batch_sampler=draws, collate_fn=mr.collate, num_workers=workers)


def legal(buffer):
    """Legal starts as pairs in order, by looking at every row."""
    view, found = buffer.view, []
    for env_id in range(buffer.num_envs):
        first, stop = int(view.starts.first[env_id]), int(view.starts.stop[env_id])
        rows = np.arange(first, stop)
        ids = np.full(len(rows), env_id)
        found += [(env_id, p) for p in rows[view.legal(ids, rows)].tolist()]
    return found


def same_as_take(buffer, batch):
    """A batch of tensors holds what `take` gives for its places."""
    expected = buffer.take(batch.env_ids.numpy(), batch.positions.numpy()).torch()
    assert list(batch) == list(expected)
    for path in expected:
        assert batch[path].dtype == expected[path].dtype
        assert (batch[path] == expected[path]).all(), path
