"""Batches of a ring for the workers of Ray Train, by rank."""

from __future__ import annotations

from collections.abc import Sequence

import ray.train
from torch.utils.data import DataLoader

from mmreplay.batch import Batch
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, SchemaError
from mmreplay.loader.stream import ReplayStream, check_seeded
from mmreplay.samplers.base import Sampler, ask, checked, traits_of
from mmreplay.samplers.shuffled import ShuffledSampler
from mmreplay.transforms.base import Transform


def train_loader(
    path: StrPath,
    sampler: Sampler,
    batch_size: int,
    *,
    transforms: Sequence[Transform] = (),
    num_workers: int = 0,
) -> DataLoader[Batch]:
    """Return this rank's batches of a ring, in a worker of Ray Train.

    Call it in the function that a trainer runs. Rank and number of ranks come from Ray
    Train. All ranks draw equally many batches: they divide the epochs of a
    `ShuffledSampler` step by step, so that an epoch has each step at most once over
    all ranks, and those of other samplers batch by batch.

    The loader's ``dataset`` is a `ReplayStream`. Its ``state_after(n)`` after n batches
    is all that a checkpoint needs, and ``load_state_dict(state)`` continues exactly
    there. Nothing is buffered for shuffling.

    Args:
        path: Folder of the ring, on this worker's node: each node needs the ring, or a
            file system that they share.
        sampler: A new sampler, with the same seed in each rank.
        batch_size: Steps, or windows, of a rank's batch.
        transforms: What is made of stored steps, in order.
        num_workers: Processes of the `DataLoader`; 0 reads in this one.

    Raises:
        FailedError: It is not called in a worker of Ray Train.
        SchemaError: The sampler keeps priorities, has no seed, or divides its epochs
            between other ranks.
        FormatError: There is no ring at the path.

    Example::

        def train(config):
            loader = mr.ray.train_loader(
                "/data/run", mr.ShuffledSampler(seed=0), batch_size=256
            )
            checkpoint = ray.train.get_checkpoint()
            if checkpoint is not None:
                loader.dataset.load_state_dict(read_state(checkpoint))
            for number, batch in enumerate(loader, 1):
                ...
                state = loader.dataset.state_after(number)
                ray.train.report(metrics, checkpoint=write_state(state))
    """
    try:
        context = ray.train.get_context()
        rank, num_ranks = context.get_world_rank(), context.get_world_size()
    except RuntimeError as error:
        raise FailedError(
            "train_loader needs a worker of Ray Train. Call it in the function that "
            "the trainer runs, or use mmreplay.ReplayStream elsewhere."
        ) from error
    stream = ranked_stream(path, sampler, batch_size, transforms, rank, num_ranks)
    return DataLoader(stream, batch_size=None, num_workers=num_workers)


def ranked_stream(
    path: StrPath,
    sampler: Sampler,
    batch_size: int,
    transforms: Sequence[Transform],
    rank: int,
    num_ranks: int,
) -> ReplayStream:
    """A stream of one rank's batches, equally many for all ranks.

    Args:
        path: As in `train_loader`.
        sampler: See there.
        batch_size: See there.
        transforms: See there.
        rank: In ``[0, num_ranks)``.
        num_ranks: At least 1.
    """
    own = checked(sampler)
    divided = getattr(own, "num_ranks", 1)
    if divided > 1 and (divided, getattr(own, "rank", 0)) != (num_ranks, rank):
        raise SchemaError(
            f"the {type(own).__name__} is for rank {getattr(own, 'rank', 0)} of "
            f"{divided}, but this worker is rank {rank} of {num_ranks}. Leave out "
            "its rank and num_ranks."
        )
    if num_ranks > 1 and traits_of(own).in_ranks and not ask(own, "parts"):
        check_seeded(own, num_ranks)
        state = own.state_dict()
        batches = state["batches"]
        # Without what does not fill a batch, so that no rank waits for another one.
        shared = ShuffledSampler(
            state["seed"],
            rank=rank,
            num_ranks=num_ranks,
            drop_last=batches is None,
            shuffle=state["shuffle"],
            layout=state["layout"],
            batches=batches,
            block=state.get("block", 1),
        )
        return ReplayStream(path, shared, batch_size, transforms=transforms)
    if divided > 1 or num_ranks == 1:
        return ReplayStream(path, own, batch_size, transforms=transforms)
    num_batches = None
    if traits_of(own).ends:
        # Interleaved, ranks may get numbers of batches that differ by one.
        with ReplayBuffer.open(path, transforms=transforms) as buffer:
            num_batches = own.num_batches(buffer.view, batch_size) // num_ranks
        if not num_batches:
            raise SchemaError(
                f"batch_size is {batch_size}, but an epoch of the "
                f"{type(own).__name__} has fewer batches than there are ranks "
                f"({num_ranks}). Use a smaller batch_size."
            )
    return ReplayStream(
        path, own, batch_size, num_batches, transforms=transforms, rank=rank, num_ranks=num_ranks
    )
