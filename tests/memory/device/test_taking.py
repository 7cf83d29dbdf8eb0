"""Whether a device takes a weight is asked of llama.cpp's own library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgespec.memory.device.taking import Weight, takes
from edgespec.models.gguf.ggml_types import GGML_NUMBERS

pytest.importorskip("llama_cpp", reason="asks llama.cpp's library")
Q4_0, Q6_K = GGML_NUMBERS["Q4_0"], GGML_NUMBERS["Q6_K"]

# A device with lavapipe's limit: no operand and no result above 128 MiB.
PROGRAM = """
import ctypes
from edgespec.memory.device.llama_binary import ggml_function
from edgespec.memory.device.taking import Weight, takes

pointer, size = ctypes.c_void_p, ctypes.c_size_t
name = ctypes.create_string_buffer(b"Small0")
asked = []

class Device(ctypes.Structure):
    # struct ggml_backend_device
    _fields_ = [("functions", pointer * 16), ("reg", pointer)]

by_name = ggml_function("ggml_backend_dev_by_name", pointer, ctypes.c_char_p)
kind_of = ggml_function("ggml_backend_dev_buffer_type", pointer, pointer)
processors = kind_of(by_name(b"CPU"))
nbytes = ggml_function("ggml_nbytes", size, pointer)
# struct ggml_tensor: where its operands are listed
sources = 8 + 8 + 4 * 8 + 4 * 8 + 4 + 16 * 4 + 4

def supports(_device, result):
    operands = (pointer * 10).from_address(result + sources)
    tensors = [result, *(one for one in operands if one)]
    asked.append([nbytes(one) for one in tensors])
    buffer = pointer.from_address(operands[0] + 8).value
    assert buffer, "a device sees whose memory a weight would lie in"
    return all(nbytes(one) <= 128 << 20 for one in tensors)

functions = {
    0: ctypes.CFUNCTYPE(pointer, pointer)(lambda _: ctypes.addressof(name)),
    6: ctypes.CFUNCTYPE(pointer, pointer)(lambda _: processors),
    9: ctypes.CFUNCTYPE(ctypes.c_bool, pointer, pointer)(supports),
}
device = Device()
for place, function in functions.items():
    device.functions[place] = ctypes.cast(function, pointer)
ggml_function("ggml_backend_device_register", None, pointer)(ctypes.addressof(device))
answers = [
    takes("Small0", Weight(2, (1536, 8960))),
    takes("Small0", Weight(2, (1536, 151936))),  # a head: its logits of a batch
    takes("Small0", Weight(14, (8192, 40000))),  # itself
    takes("Small0", Weight(2, (1024, 512, 8), 2)),
    takes("Small0", Weight(2, (1024, 40960, 8), 2)),
]
assert takes("Small0", Weight(2, (1536, 8960))) and len(asked) == 5, "asked once each"
print(answers, asked[0], len(asked[3]))
import os, sys
sys.stdout.flush()
os._exit(0)  # the registry would go on with a device that is gone
"""


def test_llama_cpp_s_processor_takes_all() -> None:
    for weight in (Weight(Q4_0, (1536, 151_936)), Weight(Q6_K, (2048, 512, 8), 2)):
        assert takes("CPU", weight)


def test_what_is_not_there_refuses_nothing() -> None:
    assert takes("Nowhere0", Weight(Q4_0, (64, 64)))


def test_a_device_is_asked_as_llama_cpp_asks() -> None:
    """Of the weight, 512 tokens and their product; of experts with the choice among them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    sizes = [512 * 8960 * 4, 1536 * 8960 // 32 * 18, 512 * 1536 * 4]
    assert done.stdout == f"[True, False, False, True, False] {sizes} 4\n"
