# A fresh Linux machine with Python 3.11 (or 3.12) needs nothing else: `make test` or `make demo` sets up what it needs.
# Another Python: make test PYTHON=/path/to/python3.11

SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for name in python3.11 python3.12 python3 python; do \
  "$$name" -c '$(SUITABLE)' >/dev/null 2>&1 && { echo "$$name"; break; }; done)

.PHONY: help setup demo test test-slow test-redis62 capabilities chaos check clean

help:
	@echo "make setup   create .venv with everything (a few minutes the first time, then nothing)"
	@echo "make demo    the whole loop on this machine, without a GPU or a Redis; draws into out/"
	@echo "make test    the tests: real redis-server, real SGLang on CPU (PYTEST='-k name' for some)"
	@echo "make test-slow    the few that take longest"
	@echo "make test-redis62   the tests that need a Redis once more, on the embedded redis-server 6.2"
	@echo "make capabilities   docs/capabilities.md from the last test run"
	@echo "make chaos   real faults and an oracle that reads Redis' log (SEED=7 ONLY=kill,cut to replay; docs/chaos.md)"
	@echo "make check   formatting, lint, strict types, import order, file sizes, that every test can be imported"
	@echo "make clean   remove .venv, out/ and caches"

setup:
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 or 3.12 found on PATH; install one or pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" tools/setup_env.py

demo: setup
	.venv/bin/rolloutmq demo

test: setup
	@mkdir -p out
	.venv/bin/python -m pytest --ignore=tests/gpu --ignore=tests/chaos -m "not slow" --junitxml=out/tests.xml $(PYTEST)

# What takes long and is seldom broken alone.
test-slow: setup
	@mkdir -p out
	.venv/bin/python -m pytest --ignore=tests/gpu --ignore=tests/chaos -m slow --junitxml=out/tests-slow.xml $(PYTEST)

# docs/capabilities.md from what the last `make test` said, and the last run of tests/gpu on a GPU host.
capabilities:
	.venv/bin/python tools/capabilities.py $(wildcard out/tests.xml out/tests-slow.xml benchmarks/results/gpu-tests.xml)

# What depends on the server, on the oldest one that is supported: `make test` takes the newest it finds.
test-redis62: setup
	ROLLOUTMQ_REDIS_SERVER="$$(.venv/bin/python -c 'from rolloutmq.ops.redis.binary import wheel_server as w; print(w())')" \
	  .venv/bin/python -m pytest tests/messages tests/sync tests/producer tests/worker tests/ops --ignore=tests/worker/sglang $(PYTEST)

# CHAOS='--fast --runs 5' and the like for more; a failure prints the line that replays it.
chaos: setup
	PYTHONPATH=tests .venv/bin/python -m chaos $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(CHAOS)

check: setup
	@mkdir -p out
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	MYPYPATH=.venv/src .venv/bin/mypy -p rolloutmq
	.venv/bin/python -m pytest -q --collect-only >out/collected.txt || { tail -40 out/collected.txt; exit 1; }
	.venv/bin/python -m pytest -q tests/house/test_import_order.py tests/house/test_file_size.py

clean:
	rm -rf .venv out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
