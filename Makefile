# Two commands matter to a newcomer: `./corral up` and `make test`.
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest

.PHONY: test lint unit cluster integration e2e bench-start lock clean

test: lint unit cluster integration e2e  ## everything a change must pass

lint: .venv/.test-installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/shellcheck corral tools/*.sh .ci/run

unit: .venv/.test-installed  ## seconds, no network, no engine
	$(PYTEST) tests/unit --numprocesses 4 --dist worksteal --reruns 2 --timeout 240

cluster: .venv/.test-installed  ## real sshd, SLURM and Docker on simulated hosts, with stand-in engines
	-tools/install_testbed.sh --with-accounting  # without root the tests that need it are skipped, and say so
	$(PYTEST) tests/cluster --numprocesses 3 --dist loadfile --reruns 1

integration: .venv/.test-installed  ## real vLLM on the CPU (installed into .scratch/), on one host and on several
	-tools/install_testbed.sh --with-accounting  # without root the tests that need it are skipped, and say so
	$(PYTEST) tests/integration --reruns 1

e2e: .venv/.test-installed  ## pages in a real browser (Debian's chromium, installed when missing)
	tools/install_browser.sh $(PYTHON)
	$(PYTEST) tests/e2e --reruns 1

bench-start: .venv/.test-installed  ## how long starts take, as figures
	$(PYTHON) benchmarks/start.py

lock: .venv/.test-installed  ## resolve the engines' pinned packages anew
	$(PYTHON) tools/lock_engines.py

.venv/.test-installed: pyproject.toml
	./corral --version
	$(PYTHON) -m uv pip install --quiet --python $(PYTHON) --editable '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-* .venv.lock .scratch .mypy_cache .ruff_cache .pytest_cache .hypothesis
