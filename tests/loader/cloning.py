"""One rank of behaviour cloning over a stream; test_cloning.py starts several.

python tests/loader/cloning.py FOLDER RANK NUM_RANKS WORKERS RENDEZVOUS OUT
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import mmreplay as mr

BATCH = 32


def train(folder, rank, num_ranks, workers):
    """One epoch; gradients are of the sum over the batches of all ranks."""
    torch.manual_seed(0)
    policy = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
    ).double()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    stream = mr.ReplayStream(
        folder, mr.ShuffledSampler(seed=0), BATCH, rank=rank, num_ranks=num_ranks
    )
    # In one process: as many batches an update as there are ranks elsewhere.
    each = 1 if num_ranks > 1 else 2
    batches = iter(DataLoader(stream, batch_size=None, num_workers=workers))
    places, going = [], torch.ones(1)
    while going:
        optimizer.zero_grad()
        count = torch.zeros(1, dtype=torch.float64)
        for _ in range(each):
            batch = next(batches, None)
            if batch is not None:
                loss = torch.nn.functional.cross_entropy(
                    policy(batch["observation"].double()), batch["action"], reduction="sum"
                )
                loss.backward()
                count += len(batch)
                places.append(torch.stack([batch.env_ids, batch.positions]))
        for parameter in policy.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if num_ranks > 1:
                dist.all_reduce(parameter.grad)
        if num_ranks > 1:
            dist.all_reduce(count)
        going = count > 0
        if going:
            for parameter in policy.parameters():
                parameter.grad /= count
            optimizer.step()
    weights = torch.cat([p.detach().ravel() for p in policy.parameters()])
    return weights.numpy(), torch.cat(places, 1).numpy()


def main(folder, rank, num_ranks, workers, rendezvous, out):
    """Train and write what came of it."""
    rank, num_ranks = int(rank), int(num_ranks)
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
        )
    weights, places = train(folder, rank, num_ranks, int(workers))
    np.savez(out, weights=weights, places=places)
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
