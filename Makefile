# Two commands for people: `make run` answers a prompt, `make test` runs every check.
# Each sets up its own virtual environment first. Needs Python 3.10+, a C++ compiler and cmake.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Why is the sky blue?
BIN := $(VENV)/bin

# The editable install is a tree of links: it is made again when a file comes, moves or goes.
FILES := $(shell find edge backends memory quantize cli models -name '*.py' | LC_ALL=C sort)
STAMP := $(VENV)/installed-$(shell { echo $(FILES); cat pyproject.toml; } | cksum | cut -d' ' -f1)

# Compilers up to GCC 12 or so leave out half of what llama.cpp's AMX kernels are configured with,
# and the first step then ends in a segmentation fault (llama.cpp issue 20824).
NO_AMX := $(shell echo | $(CXX) -march=native -dM -E - 2>/dev/null | grep -q AMX_INT8 && echo -mno-amx-int8)
ifneq ($(NO_AMX),)
export CMAKE_ARGS := -DCMAKE_C_FLAGS=$(NO_AMX) -DCMAKE_CXX_FLAGS=$(NO_AMX) $(CMAKE_ARGS)
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
