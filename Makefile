# Everything runs through uv; scripts/bootstrap puts it into .tools/ when the machine has none.
ARGS ?=
UV := $(shell command -v uv || echo .tools/bin/uv)
SYNC := $(UV) sync --frozen --quiet --extra worker-cpu

# `make test ARGS='tests -k router'` runs a part.
.PHONY: run test check lint generate bench clean

run: $(UV) ## one machine, end to end: prefill + decode workers on vLLM (CPU), gateway, one chat
	@$(SYNC)
	@.venv/bin/cleave demo $(ARGS)

test: check ## the same thing

check: lint ## what CI runs: lint, types, layers, generated files, every test
	.venv/bin/pytest $(ARGS)

lint: $(UV)
	@$(SYNC)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	scripts/generate --check

generate: $(UV) ## crds/ and operator/cleave/rpc/v1 from their only sources
	@$(SYNC)
	scripts/generate

bench: $(UV) ## the gateway's cost per request and per token beside a C floor
	@$(SYNC)
	.venv/bin/python benchmarks/gateway/run.py $(ARGS)

clean:
	rm -rf .venv .tools .mypy_cache .pytest_cache .ruff_cache

.tools/bin/uv:
	@scripts/bootstrap
