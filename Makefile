# Needs python3 (3.11 or later), pip and make. Everything is installed into .venv, nothing elsewhere.
PYTHON ?= python3
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
FUZZ_SECONDS ?= 600
FUZZ_MESSAGES ?= 300000
FAULTS ?= 500
SOAK_SECONDS ?= 600
BENCH_JSON ?= bench.json
OUT ?= runs/learn
SEED ?= 0
KILLS ?= 10
MINUTES ?= 30

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
MAIN_STAMP := $(VENV)/.installed
PARITY_VENV := .venv-parity$(if $(TRANSFORMERS),-$(TRANSFORMERS))
PARITY_PIP := $(PARITY_VENV)/bin/python -m pip --disable-pip-version-check install --quiet
PARITY_STAMP := $(PARITY_VENV)/.installed
BENCH_STAMP := $(PARITY_VENV)/.installed-bench
FAMILIES := .families
# Ready environments of the inference servers may be named; otherwise `make integration-*` installs its own.
export MMRENDER_VLLM_ENV ?= $(CURDIR)/.venv-vllm
export MMRENDER_SGLANG_ENV ?= $(CURDIR)/.venv-sglang
export MMRENDER_DYNAMO_ENV ?= $(CURDIR)/.venv-dynamo
MODELS ?= $(sort $(wildcard ../shared/models/*/))
CASES ?= 300

# Nothing that runs here may depend on a model hub being reachable.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM ?= false
# Byte code is kept: a server would compile its sources, a minute of processor time, at every start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test errors blocks check lint types layers words docs package release-check import-time parity families processors bench learn learn-agent learn-vllm parallel speed-page soak faults fleet fuzz clean \
	browser screenshots gallery .venv-vllm integration-vllm integration-sglang integration-dynamo

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16

setup: $(MAIN_STAMP) ## create .venv with everything that demo, test and check need

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "mmrender needs Python 3.11 or later; name one with: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Dependency groups need pip 25.1; the pip that venv brings may be older.
$(MAIN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) 'pip>=25.1'
	$(PIP) --group test --group dev -e '.[all]'
	@touch $@

demo: $(MAIN_STAMP) ## build a tiny model, render a conversation with pictures and show its tokens, also as runs/demo.html
	$(BIN)/mmrender demo --html runs/demo.html

# Files run in the order of their names, which has the long ones at the beginning; by default those with the fewest
# tests come last.
test: $(MAIN_STAMP) ## run the tests
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

errors: $(MAIN_STAMP) ## write the error sentences that the tests expect, tests/errors, from the tests of TESTS
	$(BIN)/python -m pytest -q --snapshot-update $(or $(TESTS),tests/unit tests/property)

blocks: $(MAIN_STAMP) ## list the code blocks of README, guides and docstrings, and which of them run
	$(BIN)/python tests/doc_pages.py

check: lint types layers words docs package ## run every static check and prove the package

lint: $(MAIN_STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(MAIN_STAMP) ## mypy --strict
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy tools

layers: $(MAIN_STAMP) ## imports run one way (import-linter)
	$(BIN)/lint-imports

words: $(MAIN_STAMP) ## count words that make sentences harder to read, in code and guides
	$(BIN)/python tools/check_words.py

docs: $(MAIN_STAMP) ## build the documentation into site/, and check the pages that commands write
	$(BIN)/python tools/profiles_page.py --check
	$(BIN)/python tools/scale_page.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(MAIN_STAMP) ## build, install with core dependencies only, and render there
	$(BIN)/python tools/check_package.py

release-check: $(MAIN_STAMP) ## rehearse a release: versions, changelog, sdist and wheel in dist/, installed alone; TAG=v1.2.3 for the release itself
	$(BIN)/python tools/release_check.py $(if $(TAG),--tag "$(TAG)")

import-time: $(MAIN_STAMP) ## measure `import mmrender` and name what it pulls in
	$(BIN)/python tools/check_import.py

# The reference's torch back end needs torchvision. Its wheel asks for another torch than the CPU one, and its
# transforms, which are all that an image processor uses, work without it; so it gets an environment of its own.
$(PARITY_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PARITY_VENV)
	sed '$(if $(TRANSFORMERS),s/^transformers==.*/transformers==$(TRANSFORMERS)/)' constraints.txt > $(PARITY_VENV)/constraints.txt
	$(PARITY_PIP) -c $(PARITY_VENV)/constraints.txt -e '.[all]'
	$(PARITY_PIP) --no-deps torchvision==0.28.0
	@touch $@

parity: $(PARITY_STAMP) ## compare MODELS with TRANSFORMERS (a release) in CASES conversations, both image back ends
	@test -n "$(MODELS)" || { echo "no model directories; name some with: make parity MODELS=DIR" >&2; exit 1; }
	$(PARITY_VENV)/bin/mmrender parity $(MODELS) --cases $(CASES)

# The wheels are read as archives: none of their requirements is installed.
$(FAMILIES)/.built: tools/families.py tools/families.toml $(PARITY_STAMP)
	$(PARITY_PIP) 'pip>=25.1'
	$(PARITY_PIP) -c constraints.txt --group families
	$(PARITY_VENV)/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: \
		--group family-wheels --dest $(FAMILIES)/wheels
	$(PARITY_VENV)/bin/python tools/families.py $(FAMILIES)/wheels $(FAMILIES)/models
	@touch $@

families: $(FAMILIES)/.built ## build directories of families, without weights, in .families/models

processors: $(FAMILIES)/.built ## compare every model type with images of Transformers, and write the table of docs/families.md
	$(PARITY_VENV)/bin/python tools/processors_page.py $(FAMILIES)/wheels $(FAMILIES)/processors

# Beside torchvision, without which the reference has no torch back end.
$(BENCH_STAMP): $(PARITY_STAMP)
	$(PARITY_PIP) 'pip>=25.1'
	$(PARITY_PIP) -c $(PARITY_VENV)/constraints.txt --group bench -e '.[all]'
	@touch $@

bench: $(BENCH_STAMP) ## one table against the reference, peers and physical limits; QUICK=1 takes three minutes
	$(PARITY_VENV)/bin/python benchmarks/run.py $(if $(QUICK),--quick) --json $(BENCH_JSON)

speed-page: $(MAIN_STAMP) ## write the figures of `make bench` into docs/, with the plots of growth
	$(BIN)/python tools/speed_page.py $(BENCH_JSON)

# Chromium comes from the system: apt-get install chromium. axe-core, which judges accessibility, comes from npm.
BROWSER_STAMP := $(VENV)/.installed-browser
$(BROWSER_STAMP): $(MAIN_STAMP)
	@command -v chromium >/dev/null || { echo "no chromium: apt-get install chromium" >&2; exit 1; }
	$(PIP) --group browser
	mkdir -p .browser && cd .browser && npm pack --silent axe-core@4.14.1 && tar -xzf axe-core-*.tgz \
		|| echo "no axe-core from npm: accessibility is not judged" >&2
	@touch $@

browser: $(BROWSER_STAMP) ## test the page of tokens and the guides in headless Chromium
	MMRENDER_TIERS=browser $(BIN)/python -m pytest -q tests/browser

screenshots: MODEL ?= $(wildcard ../shared/models/qwen3_vl)
screenshots: $(BROWSER_STAMP) ## make the pictures of docs/images; MODEL=DIR shows another model's tokens
	$(BIN)/python tools/screenshots.py $(if $(MODEL),--model $(MODEL))
	$(BIN)/python tools/screenshots.py --live $(if $(MODEL),--model $(MODEL))

gallery: $(BROWSER_STAMP) docs ## photograph the site and the pages of tokens at three widths in light and dark, into runs/gallery
	$(BIN)/python tools/screenshots.py --gallery runs/gallery

# Installed once, 2.2 GB; a named environment is taken as it is.
.venv-vllm: $(MAIN_STAMP)
	@$(BIN)/python tools/servers/environments.py vllm $@ || { echo "no environment for vLLM: it needs Python 3.11 and \
	pip with a package index; or name a ready one: make integration-vllm MMRENDER_VLLM_ENV=DIR" >&2; exit 1; }

integration-vllm: $(MAIN_STAMP) $(if $(filter $(CURDIR)/.venv-vllm,$(MMRENDER_VLLM_ENV)),.venv-vllm) ## drive a real vLLM on the CPU: six minutes, 2.2 GB
	MMRENDER_TIERS=vllm OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/integration

integration-sglang: $(MAIN_STAMP) ## drive a real SGLang on the CPU: 1 start, 2.3 GB
	@test "$$MMRENDER_SGLANG_ENV" != $(CURDIR)/.venv-sglang \
		|| $(BIN)/python tools/servers/environments.py sglang .venv-sglang
	MMRENDER_TIERS=sglang OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/integration/test_sglang_tier.py

# Dynamo is published for Python 3.12; the installer ends with 3 where there is none.
integration-dynamo: $(MAIN_STAMP) ## drive a real Dynamo, with a worker that runs the tiny model: 2 starts, 0.4 GB
	@if test "$$MMRENDER_DYNAMO_ENV" != $(CURDIR)/.venv-dynamo \
		|| $(BIN)/python tools/servers/environments.py dynamo .venv-dynamo; then \
		MMRENDER_TIERS=dynamo OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/integration/test_dynamo_tier.py; \
	else \
		status=$$?; test $$status -eq 3 && echo "integration-dynamo: skipped, since there is no Python 3.12"; \
	fi

# Each library is installed by itself, on top of .venv.
LIBRARIES := renderers transformers mistral trl datasets ray router skyrl tinker verl agents
.PHONY: $(LIBRARIES:%=integration-%)
$(LIBRARIES:%=integration-%): integration-%: $(MAIN_STAMP)
	$(BIN)/python tools/libraries.py $* .venv-libraries/$*

# It drives vLLM, too.
integration-router: $(if $(filter $(CURDIR)/.venv-vllm,$(MMRENDER_VLLM_ENV)),.venv-vllm)

learn: $(MAIN_STAMP) ## train a small model on pictures until it plays a game, into OUT; SEED and LEARN="--flag" change it
	PYTHONPATH=examples $(BIN)/python -m grpo --out $(OUT) --seed $(SEED) $(LEARN)

learn-agent: OUT = runs/learn-agent
learn-agent: $(MAIN_STAMP) ## the same with an agent that calls a gateway by the client of OpenAI
	PYTHONPATH=examples $(BIN)/python -m grpo --agent --out $(OUT) --seed $(SEED) $(LEARN)

learn-vllm: $(MAIN_STAMP) $(if $(filter $(CURDIR)/.venv-vllm,$(MMRENDER_VLLM_ENV)),.venv-vllm) ## the same against a real vLLM, as a fleet whose processes are killed KILLS times
	PYTHONPATH=examples:tests OMP_NUM_THREADS=1 $(BIN)/python tests/learn_faults.py --out $(OUT) --kills $(KILLS) --seed $(SEED) \
		-- --steps 45 $(LEARN)

parallel: $(MAIN_STAMP) ## FSDP2, tensor and context parallel on two gloo processes, compared with one process
	PYTHONPATH=examples OMP_NUM_THREADS=1 $(BIN)/python -m parallel

soak: $(MAIN_STAMP) ## roll out and ship for SOAK_SECONDS; memory must stay flat and nothing be left
	OMP_NUM_THREADS=1 $(BIN)/python tools/soak.py --seconds $(SOAK_SECONDS)

faults: $(MAIN_STAMP) ## kill FAULTS senders and receivers over each link, and a gateway at each point; nothing may be lost or doubled
	OMP_NUM_THREADS=1 $(BIN)/python tests/shipping_faults.py --kills $(FAULTS)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/gateway_kills.py

fleet: $(MAIN_STAMP) ## 1,000 environments, 64 engines, 4 receivers and 16 ranks for MINUTES, with 20 kills; FLEET="--flag" changes it
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/fleet_faults.py --minutes $(MINUTES) --seed $(SEED) $(FLEET)

fuzz: $(MAIN_STAMP) ## mutate FUZZ_MESSAGES codec messages, then run the property tests with fresh seeds
	$(BIN)/python tests/codec_fuzz.py --messages $(FUZZ_MESSAGES)
	$(BIN)/python tools/fuzz.py --seconds $(FUZZ_SECONDS) --jobs $(JOBS)

clean: ## remove what the targets above have made
	rm -rf $(VENV) .browser .venv-libraries .venv-parity* $(FAMILIES) .venv-vllm .venv-sglang .venv-dynamo build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
