"""Draws by seed, parts of splits, and what transforms make: one case a function."""

from __future__ import annotations

import numpy as np

import mmreplay as mr
from tests.frozen.frozen_files import described, digest, packed
from tests.frozen.frozen_worlds import buffer, drawn, fixed_uuids
from tests.frozen.states_cases import SAMPLERS

SEEDS = (0, 7, (1 << 63) - 4)
KEYS = (0, 5, (1 << 64) - 1)


def draws_by_seed(name, folder):
    """Three draws of a sampler by each seed: the first steps, and digests of all."""
    found = {}
    for seed in SEEDS:
        # In a buffer of its own: one of priorities would go on with the next seed.
        with fixed_uuids(), buffer(folder, "memory") as made:
            made.sampler = SAMPLERS[name](made, seed)
            found[str(seed)] = [_short(made.sample(count)) for count in (1, 16, 16)]
    return found


def _short(batch):
    arrays = batch.env_ids, batch.positions, batch.probabilities, batch.weights
    steps = list(zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True))
    return {
        "first": [list(step) for step in steps[:4]],
        "key": batch.key,
        "digests": [digest(array) for array in arrays],
        "fields": digest("".join(map(str, drawn(batch)["fields"].values())).encode()),
    }


def splits(folder):
    """States of the parts of splits."""
    found = {}
    with fixed_uuids(), buffer(folder / "a") as made:
        for by in ("episode", "step"):
            for seed in (0, 1):
                for fractions in ([0.9, 0.1], [0.5, 0.25, 0.2]):
                    parts = mr.split(made, fractions, by=by, seed=seed)
                    states = [packed(part.state_dict()) for part in parts]
                    found[f"{by}/{seed}/{fractions}"] = states
    return found


GOAL = ((2,), "float32")
FIELDS = {
    "observation/state": ((3,), "float32"),
    "observation/achieved_goal": GOAL,
    "observation/desired_goal": GOAL,
    "frame": ((2, 2), "uint8"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "value": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}


def _reached(achieved, desired, info):
    return (np.abs(achieved - desired).max(-1) < 3).astype(np.float32) - 1


def _jittered(fields, generator):
    state = fields["observation/state"]
    return {"observation/state": state + generator.random(state.shape, np.float32)}


TRANSFORMS = {
    "nstep": lambda: [mr.NStep(3, 0.97)],
    "frame_stack": lambda: [mr.FrameStack(4, ("observation/state",))],
    "action_history": lambda: [mr.ActionHistory(3)],
    "discounted_return": lambda: [mr.DiscountedReturn(0.9)],
    "lambda_return": lambda: [mr.LambdaReturn(0.9, 0.8)],
    "gae": lambda: [mr.GAE(0.99, 0.95)],
    "gae_horizon": lambda: [mr.GAE(0.99, 0.95, horizon=3, default=0.0)],
    "delta": lambda: [mr.Delta(("observation/state",))],
    "cast": lambda: [mr.Cast("float64", "frame", scale=1 / 255, offset=-0.5)],
    "one_hot": lambda: [mr.OneHot(16, "action")],
    "normalize": lambda: [
        mr.Normalize({"observation/state": 75.5}, {"observation/state": 3.25}, clip=9.0)
    ],
    "apply_random": lambda: [mr.Apply(_jittered, random=True)],
    "her_future": lambda: [mr.HER("future", 0.8, _reached)],
    "her_final": lambda: [mr.HER("final", 0.8, _reached)],
    "her_episode": lambda: [mr.HER("episode", 0.5, _reached)],
    "her_nstep": lambda: [mr.HER("future", 0.8, _reached), mr.NStep(3, 0.9)],
    "stack_nstep": lambda: [mr.FrameStack(2, ("observation/state",)), mr.NStep(2, 0.9)],
}


def _goals(folder, engine, transforms):
    """A buffer of goals, values and frames, in its second lap."""
    schema = mr.Schema.from_flat(
        {path: mr.Field(shape, dtype) for path, (shape, dtype) in FIELDS.items()}
    )
    made = mr.ReplayBuffer.create(
        None if engine == "memory" else folder,
        schema,
        64,
        2,
        engine=engine,
        autoreset="same_step",
        commit_every=None,
        transforms=transforms,
    )
    ids = np.arange(2)
    for number in range(90):
        values = np.float32(number) + ids.astype(np.float32) * 50
        pair = np.stack([values % 7, values % 5], -1)
        terminated = (number + 3 * ids) % 13 == 12
        truncated = (number + ids) % 19 == 18
        observation = {
            "state": values[:, None] + np.arange(3, dtype=np.float32) / 8,
            "achieved_goal": pair,
            "desired_goal": pair[:, ::-1] + 1,
        }
        final = {name: column + 100 for name, column in observation.items()}
        ended = bool((terminated | truncated).any())
        made.add(
            {
                "observation": observation,
                "frame": np.full((2, 2, 2), number % 251, np.uint8),
                "action": (ids * 7 + number) % 16,
                "reward": ((number * 5 + ids * 3) % 16 - 8).astype(np.float32) / 4,
                "value": ((number * 3 + ids) % 32 - 16).astype(np.float32) / 8,
                "terminated": terminated,
                "truncated": truncated,
            },
            final_observation=final if ended else None,
        )
    return made


def transformed(name, folder, engine="memmap"):
    """Batches and windows of a buffer through transforms, by fixed keys."""
    with fixed_uuids(), _goals(folder / "a", engine, TRANSFORMS[name]()) as made:
        made.sampler = mr.UniformSampler(3)
        batch = made.sample(16)
        found = {"sample": drawn(batch)}
        for key in KEYS:
            again = made.take(batch.env_ids, batch.positions, key=key)
            found[f"take {key}"] = {path: described(again[path]) for path in sorted(again.keys())}
        if name not in WITHOUT_WINDOWS:
            made.sampler = mr.SequenceSampler(4, mr.UniformSampler(3))
            found["windows"] = drawn(made.sample(6))
    return found


WITHOUT_WINDOWS = {"delta"}


def recordings(folder):
    """Entries of draws.json."""
    found = {}
    for name in SAMPLERS:
        (folder / "seeds" / name).mkdir(parents=True)
        found[f"seeds/{name}"] = draws_by_seed(name, folder / "seeds" / name)
    found["splits"] = splits(folder)
    for name in TRANSFORMS:
        (folder / name).mkdir()
        found[f"transforms/{name}"] = transformed(name, folder / name)
    return found
