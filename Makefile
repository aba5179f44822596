# Two commands matter to a newcomer: `./corral up` and `make test`. `make help` lists the rest.
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
# root has everything installed; anybody else goes without, and what is skipped says so (tests/skips.py)
INSTALL = tools/install_testbed.sh $(1) || test "$$(id -u)" -ne 0
# where it is set, each of the thousands of processes of the tests compiles all it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test lint collect unit docs reference fuzz hostile soak faults cluster engine client-packages clients integration e2e bench-start lock clean

# Two at a time where one alone leaves a core idle: cluster waits more than it computes, what is beside it computes on one
# core; the last of that, the default model's first start, is what integration would begin with, and other people's
# clients, which are a download. Lint is not beside e2e, which builds a wheel in this folder. Unit, integration and clients
# fill two cores and run alone (cluster beside integration gained nothing and cost tests that wait). Everything of the
# distribution is installed first: only one can install.
test: .venv/.test-installed  ## everything a change must pass: all tiers, the waiting ones side by side
	$(call INSTALL)
	$(PYTHON) tools/side_by_side.py e2e docs
	$(PYTHON) tools/side_by_side.py cluster lint,fuzz,hostile,collect,engine,client-packages
	$(MAKE) --no-print-directory unit integration clients

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

lint: .venv/.test-installed  ## ruff, mypy, the documentation's site without a dead link, commit subjects, shellcheck
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mkdocs build --strict --quiet
	$(PYTHON) tools/check_commit_subjects.py
	$(call INSTALL,unit)
	@if command -v shellcheck >/dev/null; then shellcheck corral tools/*.sh .ci/run; \
	else echo "lint: shell scripts go unchecked: there is no shellcheck, and only root can install it"; fi

FUZZ_SECONDS ?= 60
fuzz: .venv/.test-installed  ## hostile input to every decoder, for FUZZ_SECONDS
	$(call INSTALL,unit)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTEST) tests/fuzz --timeout 0

HOSTILE_SECONDS ?= 60
HOSTILE_SEED ?= 1
hostile: .venv/.test-installed  ## hostile clients against a gateway, beside honest streams, for HOSTILE_SECONDS
	$(PYTHON) -m tests.hostile_clients --seconds $(HOSTILE_SECONDS) --seed $(HOSTILE_SEED)

SOAK_MINUTES ?= 30
# where the members of the fleet on the failing storage run: local, ssh or slurm
SOAK_ON ?= local
soak: .venv/.test-installed  ## random faults: nodes, tunnel, batch service, gateway; then the storage; SOAK_MINUTES each; as root
	$(call INSTALL,cluster)
	$(PYTHON) tests/soak.py --minutes $(SOAK_MINUTES) $(if $(SOAK_SEED),--seed $(SOAK_SEED))
	$(PYTHON) -m tests.storage_slice --on $(SOAK_ON) --minutes $(SOAK_MINUTES) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

faults: .venv/.test-installed  ## the table of docs/measurements/faults.md: what is noticed when, and what is left; as root
	$(call INSTALL,cluster)
	$(PYTHON) -m tests.cluster.faults $(FAULTS)

collect: .venv/.test-installed  ## reads the unit tests once; four workers would each compile them
	$(PYTEST) tests/unit --collect-only >/dev/null

unit: .venv/.test-installed  ## no network, no engine
	$(call INSTALL,unit)
	$(PYTEST) tests/unit --numprocesses 4 --dist worksteal --timeout 240

docs: .venv/.test-installed  ## every command and Python block of README and docs/, with stand-ins
	$(PYTEST) tests/docs --numprocesses 2 --dist worksteal

reference: .venv/.test-installed  ## docs/reference/ written anew from what `--help` prints
	$(PYTHON) tools/write_reference.py

cluster: .venv/.test-installed  ## real sshd, SLURM, Docker, Podman and Apptainer on simulated hosts, with stand-in engines
	$(call INSTALL,cluster)
	$(PYTEST) tests/cluster --numprocesses 4 --dist loadfile --no-loadscope-reorder --reruns 1 --durations 12

integration: .venv/.test-installed  ## real vLLM on the CPU (installed into .scratch/), on one host and on several
	$(call INSTALL,cluster browser)
	$(PYTEST) tests/integration --numprocesses 3 --dist loadfile --no-loadscope-reorder --timeout 1500 \
		--reruns 1 --durations 12

engine: .venv/.test-installed  ## the engine of the real-vLLM tier, and its default model compiled (into .scratch/)
	nice -n 5 $(PYTHON) -m tests.integration.first_start  # beside it, tests are waiting for something

client-packages: .venv/.test-installed  ## other people's clients, installed into .scratch/: a slow index fails no test
	nice -n 5 $(PYTHON) -m tests.clients.environments

clients: .venv/.test-installed  ## other people's clients (installed into .scratch/) at real vLLM and the gateway
	$(PYTEST) tests/clients --timeout 900 --durations 12

e2e: .venv/.test-installed  ## pages in a real browser; Corral installed from its wheel
	$(call INSTALL,browser)
	$(PYTEST) tests/e2e --reruns 1

bench-start: .venv/.test-installed  ## how long starts take, as figures
	$(PYTHON) benchmarks/start.py

lock: .venv/.test-installed  ## resolve the engines' pinned packages anew
	$(PYTHON) tools/lock_engines.py
	$(PYTHON) tools/check_engine_locks.py

.venv/.test-installed: pyproject.toml
	./corral --version
	$(PYTHON) -m uv pip install --quiet --python $(PYTHON) --editable '.[test]'
	touch $@

clean:  ## remove everything these targets made
	rm -rf .venv .venv-* .venv.lock .scratch .mypy_cache .ruff_cache .pytest_cache .hypothesis
