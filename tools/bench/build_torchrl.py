"""Compile TorchRL's C++ trees anew, from the sources that its wheel carries.

TorchRL 0.14.1's wheel is built against another torch than the one pinned in
peers.txt, so that its C++ does not load and neither trees nor prioritized draws
work. Run once in the environment of the peers; it needs a C++ compiler and takes a
minute or two. Where the C++ loads already, nothing is done.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import chdir
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

NAME = "_torchrl"


def main() -> int:
    """Build the extension and put it in the place of the one that does not load."""
    import_module("torch")
    spec = find_spec("torchrl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("torchrl is not installed; docs/benchmarks.md says how")
    home = Path(spec.submodule_search_locations[0])
    try:
        import_module(f"torchrl.{NAME}")
    except ImportError as error:
        print(f"building anew: {str(error)[:120]}", flush=True)
    else:
        print("TorchRL's C++ loads as it is")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        built = build(home / "csrc", Path(folder))
        for broken in home.glob(f"{NAME}*.so"):
            broken.unlink()
        shutil.copy(built, home / built.name)
    print(f"built {home / built.name}")
    return 0


def build(sources: Path, folder: Path) -> Path:
    """Compile with optimisation as TorchRL's own build does; return the file."""
    setuptools = import_module("setuptools")
    cpp = import_module("torch.utils.cpp_extension")
    extension = cpp.CppExtension(
        NAME,
        [str(sources / "pybind.cpp"), str(sources / "utils.cpp")],
        include_dirs=[str(sources)],
        extra_compile_args=["-O3"],
    )
    # Elsewhere, as setuptools takes in the pyproject.toml of where it runs.
    with chdir(folder):
        setuptools.setup(
            name=NAME,
            ext_modules=[extension],
            cmdclass={"build_ext": cpp.BuildExtension.with_options(use_ninja=False)},
            script_args=["--quiet", "build_ext", "--build-lib", str(folder)],
        )
    return next(folder.glob(f"{NAME}*.so"))


if __name__ == "__main__":
    sys.exit(main())
