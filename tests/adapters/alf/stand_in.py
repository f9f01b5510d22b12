"""alf as `install` meets it: its configuration, its class, and modules that import it.

alf is on no package index. Written after its documentation: `alf.configurable`
registers each argument by module, class and name; `alf.config` finds one by any suffix
that only one has; `alf.get_config_value` returns what was configured, or the default.
"""

import functools
import inspect
import sys
from types import ModuleType

PACKAGE = "alf.experience_replayers.replay_buffer"


class Configuration:
    """Values by the full names of arguments."""

    def __init__(self):
        self.defaults, self.values, self.used = {}, {}, set()

    def find(self, name):
        found = [n for n in self.defaults if n == name or n.endswith(f".{name}")]
        if len(found) != 1:
            raise ValueError(f"Cannot find config name {name}, or it is ambiguous")
        return found[0]

    def configurable(self, function_or_class):
        """Register the arguments of a function, or of a class."""
        signature = inspect.signature(function_or_class)
        prefix = f"{PACKAGE}.{function_or_class.__qualname__}"
        for name, parameter in signature.parameters.items():
            self.defaults[f"{prefix}.{name}"] = parameter.default
        is_class = inspect.isclass(function_or_class)
        called = function_or_class.__init__ if is_class else function_or_class

        @functools.wraps(called)
        def call(*args, **kwargs):
            passed = inspect.signature(called).bind_partial(*args, **kwargs).arguments
            for name in signature.parameters:
                if name not in passed and f"{prefix}.{name}" in self.values:
                    kwargs[name] = self.values[f"{prefix}.{name}"]
            return called(*args, **kwargs)

        if not is_class:
            return call
        function_or_class.__init__ = call
        return function_or_class

    def config(self, prefix, **values):
        for name, value in values.items():
            full = self.find(f"{prefix}.{name}")
            if full in self.used:
                raise ValueError(f"Config '{full}' has already been used.")
            self.values[full] = value

    def get_config_value(self, name):
        full = self.find(name)
        if full not in self.values and self.defaults[full] is inspect.Parameter.empty:
            raise ValueError(f"Config '{name}' is not configured nor has a default")
        self.used.add(full)
        return self.values.get(full, self.defaults[full])


def modules():
    """Return the package by its modules, as `sys.modules` has it."""
    configuration = Configuration()

    class ReplayBuffer:
        __qualname__ = "ReplayBuffer"

        def __init__(
            self,
            data_spec,
            num_environments,
            max_length=1024,
            num_earliest_frames_ignored=0,
            prioritized_sampling=False,
            initial_priority=1.0,
            recent_data_steps=1,
            recent_data_ratio=0.0,
            with_replacement=False,
            device="cpu",
            allow_multiprocess=False,
            keep_episodic_info=None,
            record_episodic_return=False,
            default_return=-1000.0,
            gamma=0.99,
            reward_clip=None,
            enable_checkpoint=False,
            name="ReplayBuffer",
        ):
            raise NotImplementedError("alf's own")

        def gather_all(self, ignore_earliest_frames=False, convert_to_default_device=True):
            raise NotImplementedError("alf's own")

        gather_all.__qualname__ = "ReplayBuffer.gather_all"
        gather_all = configuration.configurable(gather_all)

    theirs = configuration.configurable(ReplayBuffer)
    found = {}
    for name in (
        "alf",
        "alf.experience_replayers",
        PACKAGE,
        "alf.algorithms",
        "alf.algorithms.rl_algorithm",
        "alf.algorithms.data_transformer",
    ):
        found[name] = module = ModuleType(name)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(found[parent], child, module)
    found["alf"].config = configuration.config
    found["alf"].configurable = configuration.configurable
    found["alf"].get_config_value = configuration.get_config_value
    found[PACKAGE].ReplayBuffer = theirs
    found["alf.algorithms.rl_algorithm"].ReplayBuffer = theirs
    found["alf.algorithms.data_transformer"].Buffer = theirs
    return found


def put(monkeypatch):
    """Make it what `import alf` finds, and return it."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "alf"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["alf"]
