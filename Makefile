PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup lint test test-thorough test-isa gpu oracles demo demo-agent demo-vision docs dist vsix clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# mypy sees the packages where setuptools' package-dir puts them: backends/ is rldsl.backends
lint: setup
	$(BIN)/ruff check rldsl backends stdlib
	mkdir -p .lint/rldsl
	find .lint/rldsl -type l -delete
	ln -s $(CURDIR)/rldsl/* $(CURDIR)/backends $(CURDIR)/grammar $(CURDIR)/stdlib .lint/rldsl/
	MYPYPATH=.lint $(BIN)/mypy --cache-dir .lint/cache -p rldsl

# at most ten minutes on two idle cores; `tests/samples.py` says what is thorough instead
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not thorough"

# What begins within SECONDS, where there are so many tests that they may not all have time; another commit begins with
# another file
SECONDS ?= 36000
LIMIT = --seconds $(SECONDS) --begin-at "$$(git rev-parse HEAD)"

# the numbers once more, with the next smaller instruction set than the processor's best
test-isa: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.isa -n 2 --dist worksteal -m numeric $(LIMIT)

# all other tests: more samples, sizes, placements and kills of what `make test` shows
test-thorough: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m thorough $(LIMIT) \
	  $$(grep -rl --include='test_*.py' thorough tests)

# Every CUDA path on one GPU, in at most 35 minutes; nothing is installed: without a .venv, with the packages that
# $(PYTHON) has. Leaves runs/gpu/report.md and a log of each stage
gpu:
	$(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) -m tests.gpu

# The formulas of the systems that docs/algorithms.md names, from the systems themselves: each in an environment of its
# own. RECORD=--record keeps what they answer for `make test`.
ORACLES := trl trl112 verl openrlhf real
oracles: setup $(ORACLES:%=.oracles/%/.installed)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.oracles $(RECORD) .oracles

.oracles/%/.installed: tests/oracles/requirements-torch.txt tests/oracles/requirements-%.txt
	test -x .oracles/$*/bin/python || $(PYTHON) -m venv .oracles/$*
	.oracles/$*/bin/pip install --quiet --no-deps -r tests/oracles/requirements-torch.txt
	PATH="$(CURDIR)/.oracles/$*/bin:$$PATH" pip install --quiet --no-deps --no-build-isolation \
	  -r tests/oracles/requirements-$*.txt
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

demo-agent: setup
	$(BIN)/python examples/demo_agent.py

demo-vision: setup
	$(BIN)/python examples/demo_vision.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# the wheel and the source distribution, and the wheel in an empty environment far from this checkout
dist: setup
	rm -rf build/dist build/lib dist/rldsl-*
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/dist
	build/dist/bin/pip install --quiet -c constraints.txt dist/rldsl-*.whl
	cd build/dist && for name in grpo ppo dpo sft; do bin/rlc new $$name && bin/rlc check $$name.rlf && \
	  bin/rlc fmt --check $$name.rlf || exit 1; done
	build/dist/bin/rlc doctor

# vsce of the registry packs what `files` of package.json names
VSCE := @vscode/vsce@4.1.0
vsix:
	mkdir -p dist
	cp LICENSE grammar/editors/vscode
	cd grammar/editors/vscode && npm ci --omit=dev --ignore-scripts --no-audit --no-fund && \
	  npm_config_ignore_scripts=true npx --yes $(VSCE) package --allow-missing-repository --out $(CURDIR)/dist/

clean:
	rm -rf $(VENV) .oracles build dist *.egg-info runs
