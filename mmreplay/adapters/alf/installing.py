"""Our ReplayBuffer in the place of alf's, with the arguments of alf's configuration."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from mmreplay.adapters.alf import replay_buffer
from mmreplay.adapters.alf.errors import RefusedError
from mmreplay.adapters.common.location import StrPath, open_here

MODULE = "alf.experience_replayers.replay_buffer"
CLASS = "ReplayBuffer"
OWN = ("self", "path", "resume")
"""Arguments that alf does not have."""


def install(*, path: StrPath | None = None, resume: bool = False) -> None:
    """Let alf make our ReplayBuffer wherever it makes its own.

    Call it at any time before the algorithm is made: in a conf file, or before alf is
    imported. The class is replaced in every module of alf that is loaded, and in those
    that will be. Each buffer lies in a folder of its own, ``path/NAME`` by the `name`
    that alf gives it.

    An argument that alf does not pass has the value that `alf.config` gave it, before
    or after this call. Values of .gin files do not reach our class.

    Args:
        path: Folder of the buffers' folders. None: see `BufferLocation`.
        resume: Continue existing buffers.

    Raises:
        ImportError: alf is not installed.

    Example:
        >>> mmreplay.adapters.alf.install(  # doctest: +SKIP
        ...     path="runs/hopper", resume=True
        ... )
        >>> alf.config("ReplayBuffer", max_length=1_000_000)  # doctest: +SKIP
    """
    try:
        home = import_module(MODULE)
    except ImportError as error:
        raise ImportError(
            f"install needs alf, but {MODULE} cannot be imported: {error}. Install "
            "Agent Learning Framework from its repository."
        ) from error
    theirs = vars(home)[CLASS]
    if theirs is not ReplayBuffer:
        ReplayBuffer.replaced = theirs
    ReplayBuffer.top, ReplayBuffer.resume = path, resume
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "alf" and module is not None:
            for attribute, value in list(vars(module).items()):
                if value is ReplayBuffer.replaced:
                    setattr(module, attribute, ReplayBuffer)


class ReplayBuffer(replay_buffer.ReplayBuffer):
    """The ReplayBuffer that alf makes after `install`.

    Attributes:
        replaced: alf's class.
        top: The folder of the buffers' folders.
        resume: Continue existing buffers.
    """

    replaced: ClassVar[Any] = None
    top: ClassVar[StrPath | None] = None
    resume: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the buffer; see `mmreplay.adapters.alf.ReplayBuffer`."""
        call = signature(replay_buffer.ReplayBuffer.__init__)
        passed = call.bind_partial(self, *args, **kwargs).arguments
        given = configured(CLASS, (n for n in call.parameters if n not in (*passed, *OWN)))
        if self.top is not None and "path" not in passed:
            default = call.parameters["name"].default
            name = str({"name": default, **passed, **given}["name"])
            given["path"] = _own_folder(Path(self.top), name)
        super().__init__(*args, **{"resume": self.resume, **kwargs, **given})

    def gather_all(self, *args: Any, **kwargs: Any) -> Any:
        """Return copies of all steps, as alf's configuration says where it does."""
        parameters = signature(super().gather_all).parameters
        names = list(parameters)[len(args) :]
        given = configured(f"{CLASS}.gather_all", (name for name in names if name not in kwargs))
        return super().gather_all(*args, **{**kwargs, **given})


def configured(owner: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the values that alf's configuration has of some arguments.

    Args:
        owner: What has the arguments, within alf's module.
        names: Of the arguments.
    """
    get_config_value = import_module("alf").get_config_value
    found = {}
    for name in names:
        try:
            found[name] = get_config_value(f"{MODULE}.{owner}.{name}")
        except ValueError:
            # alf's own way to say that it has neither a value nor a default.
            continue
    return found


def _own_folder(top: Path, name: str) -> Path:
    """Return the folder of the buffer of a name.

    Raises:
        RefusedError: It is not the name of a folder, or another buffer has it open.
    """
    folder = name.replace("%", "%25").replace("/", "%2F")
    if folder in ("", ".", "..") or "\0" in folder or len(folder.encode()) > 255:
        raise RefusedError(
            f"name must be usable as the name of a folder, got {name!r:.80}. Give the "
            "buffer, or its algorithm, another name."
        )
    if open_here(top / folder):
        # One that was dropped, in a circle of references, has still to be collected.
        gc.collect()
        if open_here(top / folder):
            raise RefusedError(
                f"two buffers are named {name!r}, and one of them has {top / folder} "
                "open. Give them different names, or close that one first."
            )
    return top / folder
