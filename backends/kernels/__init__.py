"""Matrix products of quantized weights for few columns, in C++; llama.cpp computes with them.

The extension module here is no Python module: `backends/llama/kernels.py` gives it to llama.cpp.
"""
