# Two commands for people: `make run` answers a prompt, `make test` runs every check.
# Each sets up its own virtual environment first. Needs Python 3.10+, a C++ compiler and cmake.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Why is the sky blue?
BIN := $(VENV)/bin

# The editable install is a tree of links: it is made again when a file comes, moves or goes.
FILES := $(shell find edge backends memory quantize cli models -name '*.py' | LC_ALL=C sort)
STAMP := $(VENV)/installed-$(shell { echo $(FILES); cat pyproject.toml; } | cksum | cut -d' ' -f1)

# llama.cpp's kernels that are left out where this processor would get them:
# - AMX: compilers up to GCC 12 or so leave out half of what they are configured with, and the first
#   step ends in a segmentation fault (llama.cpp issue 20824).
# - AVX512-FP16: its loops take 128 values at a time. Attention heads have 64 in many small models,
#   which are then computed one by one: a step at 800 tokens of context took 1.6 times as long.
LEFT_OUT := $(shell echo | $(CXX) -march=native -dM -E - 2>/dev/null | \
	sed -n 's/.* __AMX_INT8__ .*/-mno-amx-int8/p; s/.* __AVX512FP16__ .*/-U__AVX512FP16__/p' | sort)
ifneq ($(LEFT_OUT),)
export CMAKE_ARGS := -DCMAKE_C_FLAGS="$(LEFT_OUT)" -DCMAKE_CXX_FLAGS="$(LEFT_OUT)" $(CMAKE_ARGS)
endif

.PHONY: run test install clean

run: $(STAMP)
	@$(BIN)/edgespec run "$(PROMPT)"

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p edgespec
	$(BIN)/mypy tests benchmarks docs
	$(BIN)/pytest

install: $(STAMP)

$(STAMP):
	@echo "setting up $(VENV); llama-cpp-python builds from source the first time (4 to 6 minutes)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "hint: on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@rm -f $(VENV)/installed-*
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -e '.[demo,test]' --config-settings editable_mode=strict
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
