# Each target alone, on a fresh clone, makes .venv, installs what it needs at the
# versions of constraints.txt, and does its work. pip's own settings (PIP_INDEX_URL,
# PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) decide where packages come from.
#
#   make demo    record, kill, reopen and train: the main job, from end to end; leaves the
#                recording in build/demo
#   make test    the tests, without the slow ones and of many cases a slice; PART=convert
#                runs those of tests/convert, PART=ray those on Ray
#   make test-core   the tests of the core, without those of its satellites
#   make docs    the documentation site, with the API reference, into build/site
#   make install-ray   an environment with Ray, in build/ray; RAY=2.55.1 makes one with
#                that version, in build/ray-2.55.1
#   make ray     the tests of mmreplay.ray in that environment, without the slow ones
#   make peers   tests beside other libraries, each group in an environment of its own;
#                PEER=skrl makes and runs one (docs/peers.md)
#   make check   format, lint, types, import layers, all tests but those on Ray; prints the layout
#   make clean   remove .venv, built kernels and the tools' caches

PYTHON ?= python3
TESTS ?= not slow and not left_out and not peer and not gpu
PYTEST_ARGS ?=
# Processes. The cases of one file run in one of them, which makes what they share once.
JOBS ?= auto
# A version of Ray; none is that of tests/on_ray/constraints.txt.
RAY ?=
RAY_TESTS ?= tests/on_ray
# No slice: tools/check runs without Ray, and what is left out would run nowhere.
RAY_MARKS ?= not slow and not peer and not gpu
PEER ?=
PART ?=

RAY_FOLDER := build/ray$(if $(RAY),-$(RAY))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
# What `make test` installs includes what `make demo` and `make docs` need, so that
# these install nothing after it.
DEMO_READY := $(if $(wildcard .venv/dev.ready),.venv/dev.ready,.venv/rl+web.ready)
DOCS_READY := $(if $(wildcard .venv/dev.ready),.venv/dev.ready,.venv/docs.ready)

# Tests start many interpreters, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# As many processes run as there are cores: threads of theirs would only take turns.
test test-core: export OMP_NUM_THREADS ?= 1
test test-core: export OPENBLAS_NUM_THREADS ?= 1

SATELLITES := adapters bench cli convert on_ray page recording tools

.PHONY: demo test test-core docs ray peers check install install-ray clean

demo: $(DEMO_READY)
	$(BIN)/python -m tools.demo

ifeq ($(PART),ray)
test: ray
else
test: .venv/dev.ready
	$(BIN)/python -m pytest $(PART:%=tests/%) -m "$(TESTS)" -n $(JOBS) --dist loadfile \
	  $(PYTEST_ARGS)
endif

test-core: .venv/dev.ready
	$(BIN)/python -m pytest tests $(SATELLITES:%=--ignore=tests/%) -m "$(TESTS)" \
	  -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

docs: $(DOCS_READY)
	$(BIN)/python -m tools.docs_site

ray: $(RAY_FOLDER)/on_ray.ready
	$(RAY_FOLDER)/bin/python -m pytest $(RAY_TESTS) -m "$(RAY_MARKS)" $(PYTEST_ARGS)

peers:
	$(PYTHON) -m tools.peers $(PEER)

check: .venv/dev.ready
	tools/check

install: .venv/dev.ready

install-ray: $(RAY_FOLDER)/on_ray.ready

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mmreplay needs Python 3.11 or newer, and $(PYTHON) is older or missing;" \
	    "name another with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 2; }

# The build runs in the environment itself, so that it too is pinned. Kernels are
# built where there is a compiler, and again when their source changes.
BUILT_OF := pyproject.toml setup.py constraints.txt \
  $(wildcard mmreplay/kernels/*.c mmreplay/kernels/*.h)
# Several extras are joined by + in the name of the file.
comma := ,
EXTRAS = $(subst +,$(comma),$*)
.venv/%.ready: $(BUILT_OF) | .venv/bin/python
	@echo "installing mmreplay[$(EXTRAS)] into .venv; the first time takes minutes"
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation --editable ".[$(EXTRAS)]"
	@touch $@

# Ray stands in an environment of its own: RLlib needs an older gymnasium than rl.
$(RAY_FOLDER)/on_ray.ready: $(BUILT_OF) tests/on_ray/constraints.txt
	@echo "installing Ray into $(RAY_FOLDER); the first time takes minutes"
	test -x $(RAY_FOLDER)/bin/python || $(PYTHON) -m venv $(RAY_FOLDER)
	sed 's/^ray==.*/$(if $(RAY),ray==$(RAY),&)/' tests/on_ray/constraints.txt \
	  >$(RAY_FOLDER)/constraints.txt
	$(RAY_FOLDER)/bin/python -m pip install -c $(RAY_FOLDER)/constraints.txt setuptools wheel
	$(RAY_FOLDER)/bin/python -m pip install -c $(RAY_FOLDER)/constraints.txt \
	  --no-build-isolation --editable ".[rllib,web,images]" pytest pytest-xdist hypothesis
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache \
	  .import_linter_cache .hypothesis mmreplay/kernels/*.so
