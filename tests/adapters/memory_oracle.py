"""Numbered samples, and what memories should hold of them."""

import torch

NAMES = ["actions", "observations", "rewards", "terminated"]


def declared(memory):
    memory.create_tensor("observations", 3, torch.float32)
    memory.create_tensor("actions", (2, 2), torch.int64, keep_dimensions=True)
    memory.create_tensor("rewards", 1)
    memory.create_tensor("terminated", 1, torch.bool)
    memory.create_tensor("values", 1)
    return memory


def samples(first, count):
    """Samples that are numbered, and tell their number in every tensor."""
    numbers = torch.arange(first, first + count)
    return {
        "observations": numbers[:, None].float() + torch.arange(3) / 8,
        "actions": numbers[:, None, None] * 10 + torch.arange(4).reshape(2, 2),
        "rewards": numbers[:, None].double() / 3,  # cast, as copy_ does
        "terminated": (numbers % 5 == 4)[:, None],
    }


class Oracle:
    """What the memory's authors meant: cells one after another, round and round."""

    def __init__(self, rows, envs):
        self.rows, self.envs = rows, envs
        self.cells, self.next, self.filled = {}, 0, False

    def add(self, first, count):
        for number in range(first, first + count):
            self.cells[self.next] = number
            self.next += 1
            if self.next == self.rows * self.envs:
                self.next, self.filled = 0, True


def assert_same(memory, oracle):
    assert len(memory) == len(oracle.cells)
    assert (memory.memory_index, memory.env_index) == divmod(oracle.next, oracle.envs)
    assert memory.filled is oracle.filled
    cells = sorted(oracle.cells)
    numbers = torch.tensor([oracle.cells[cell] for cell in cells])
    expected = samples(0, int(numbers.max()) + 1)
    (found,) = memory.sample_all(NAMES)
    for name, tensor in zip(NAMES, found, strict=True):
        wanted = expected[name][numbers].to(tensor.dtype)
        assert torch.equal(tensor, wanted)
        whole = memory.get_tensor_by_name(name)
        assert whole.shape == (oracle.rows, oracle.envs, *wanted.shape[1:])
        flat = whole.reshape(-1, *wanted.shape[1:])
        assert torch.equal(flat[cells], wanted)
        if whole.is_floating_point():
            empty = sorted(set(range(len(flat))) - set(cells))
            assert flat[empty].isnan().all()
        assert torch.equal(memory.tensors[name], whole) or whole.isnan().any()
