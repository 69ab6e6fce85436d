# Targets for development. CI runs .ci/run, which uses the commands of README.md.
VENV ?= .venv
BIN := $(VENV)/bin
PATHS := tfstyle_dist kernels tests examples benchmarks docs
SOURCES = $(wildcard $(PATHS))

VENV_ENGINES ?= .venv-engines
VENV_XLA ?= .venv-xla
XLA_BIN := $(VENV_XLA)/bin
# The wheels of torch for XLA want CUDA's libraries, about 3.6 GB to download; nothing of them is used without a GPU.
CUDA_LIBRARIES := cublas-cu12==12.8.4.1 cuda-cupti-cu12==12.8.90 cuda-runtime-cu12==12.8.90 cudnn-cu12==9.10.2.21 \
	cufft-cu12==11.3.3.83 cufile-cu12==1.13.1.3 curand-cu12==10.3.9.90 cusparse-cu12==12.5.8.93 cusparselt-cu12==0.7.1 \
	nccl-cu12==2.27.5 nvjitlink-cu12==12.8.93 nvshmem-cu12==3.3.20

# The newest torch that the suite was run with; the oldest is 2.9.1 (docs/status.md). From PyPI it comes with CUDA's
# libraries, several GB; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives the smaller CPU builds.
TORCH ?= 2.15.0
PYTHON ?= python3
VENV_TORCH ?= .venv-torch-$(TORCH)
VENV_CANARY ?= .venv-canary
VENV_FOREIGN ?= .venv-foreign
# What pytest is told by test-all and test-torch, such as TESTS='tests/core tests/train -m "not slow"'.
TESTS ?= --whole
# As constraints.txt, but for what torch itself pins.
UNPINNED = sed -E '/^(torch|triton|setuptools|fsspec|sympy|networkx)==/d' constraints.txt

.PHONY: help venv venv-xla style quality test test-all test-torch canary test-xla fuzz kills accelerate-suite test-extras foreign gpu bench dist venv-engines test-ray test-engines docs

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

venv:  ## make .venv with everything needed to work on the package
	python3 -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[test,examples,dev]'

style:  ## format, and fix what can be fixed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

quality:  ## lint, format check, types, spelling
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/codespell

test:  ## the quick tests
	$(BIN)/pytest

test-all:  ## all tests that need no accelerator
	$(BIN)/pytest $(TESTS)

test-torch:  ## test-all with another torch: make test-torch TORCH=2.9.1 TESTS=tests/core
	$(PYTHON) -m venv $(VENV_TORCH)
	$(UNPINNED) >$(VENV_TORCH)/constraints.txt
	$(VENV_TORCH)/bin/pip install -c $(VENV_TORCH)/constraints.txt torch==$(TORCH) -e '.[test,examples]'
	$(MAKE) test-all VENV=$(VENV_TORCH)

canary:  ## what a new torch would break: its private names, then the quick tests, with what pip gives today
	$(PYTHON) -m venv $(VENV_CANARY)
	$(VENV_CANARY)/bin/pip install --upgrade torch -e '.[test,examples]'
	$(VENV_CANARY)/bin/pytest tests/core/test_torch_internals.py
	$(MAKE) test VENV=$(VENV_CANARY)

fuzz:  ## many more inputs for the parsers of what comes from outside, and random programs; see CONTRIBUTING.md
	TFSTYLE_FUZZ_EXAMPLES=5000 $(BIN)/pytest -n 2 --timeout 0 tests/fuzz
	TFSTYLE_RANDOM_PROGRAMS=2000 TFSTYLE_RANDOM_PROGRAMS_FROM=$$(date +%s) $(BIN)/pytest -n 2 tests/random_programs

kills:  ## 100 kills of elastic workers at random places; see tests/elastic/test_random_kills.py
	TFSTYLE_KILLS=100 $(BIN)/pytest --whole -n 0 tests/elastic/test_random_kills.py

accelerate-suite:  ## accelerate's own tests with StrategyAccelerator in the place of Accelerator; needs a network
	$(BIN)/python tests/integrations/accelerate_suite.py

test-extras:  ## each extra alone, in an environment of its own, imports what it promises; needs an index
	TFSTYLE_TEST_EXTRAS=1 $(BIN)/pytest -n 0 tests/architecture/test_extras.py

foreign:  ## other people's models, optimizers and steps against one device, in an environment of its own; writes the table
	$(PYTHON) -m venv $(VENV_FOREIGN)
	$(UNPINNED) >$(VENV_FOREIGN)/constraints.txt
	$(VENV_FOREIGN)/bin/pip install -c $(VENV_FOREIGN)/constraints.txt torch==$(TORCH) -e '.[test,foreign]'
	$(VENV_FOREIGN)/bin/python tests/foreign/sweep/measure.py --out benchmarks/results/foreign.md

venv-engines:  ## make .venv-engines with Ray, Kubeflow's client and Lightning beside what the tests need
	$(PYTHON) -m venv $(VENV_ENGINES)
	$(VENV_ENGINES)/bin/pip install -c constraints.txt -e '.[test,ray,lightning]'
	$(VENV_ENGINES)/bin/pip install 'kubeflow>=0.5'

test-ray: venv-engines  ## the tests on a Ray of this machine
	$(VENV_ENGINES)/bin/pytest --whole -n 0 tests/integrations/on_ray

test-engines: venv-engines  ## one script under five engines; Lightning Fabric
	$(VENV_ENGINES)/bin/pytest --whole -n 0 tests/integrations/test_engines.py tests/integrations/test_adopted_groups.py tests/integrations/test_fabric.py

docs:  ## build the documentation site, strictly, into build/site; needs '.[docs,test]'
	$(BIN)/mkdocs build --strict -q -f docs/site/mkdocs.yml

gpu:  ## all that only an accelerator shows, in 8 minutes; without one, on the pretend one
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) tests/gpu/check.py

venv-xla:  ## make .venv-xla with torch 2.9.0 and torch_xla 2.9.0; never mix it with .venv
	python3.11 -m venv $(VENV_XLA)
	$(XLA_BIN)/pip install --no-deps --no-compile torch==2.9.0 torch-xla==2.9.0 $(addprefix nvidia-,$(CUDA_LIBRARIES))
	$(XLA_BIN)/pip install absl-py filelock fsspec jinja2 networkx numpy pyyaml requests sympy typing-extensions
	$(XLA_BIN)/pip install --no-deps -e .
	$(XLA_BIN)/pip install 'hypothesis>=6.100' 'pytest>=8.2' 'pytest-timeout>=2.3' 'scikit-learn>=1.4' 'tqdm>=4.66'

test-xla:  ## the tests that need torch_xla, on the CPU's virtual devices
	PJRT_DEVICE=CPU $(XLA_BIN)/pytest -m xla tests/xla

bench:  ## the benchmarks; each prints how it was measured
	@for file in $(filter-out %_tf.py $(addprefix benchmarks/,aggregation_gpu.py draw_speed.py elastic_torchft.py elastic_worker.py),$(wildcard benchmarks/*.py)); do \
		echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

dist:  ## wheel and sdist in dist/
	$(BIN)/python -m build
