"""What a file that is no GGUF is, told by how it begins."""

from __future__ import annotations

import re

_CONVERT = "convert the original model with llama.cpp's convert_hf_to_gguf.py"
_ANOTHER = "name a GGUF file, or download this one again"
# How the file begins -> what it is, what to do.
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive (perhaps a PyTorch checkpoint)", _CONVERT),
    b"\x80\x02": ("a PyTorch checkpoint", _CONVERT),
    b"\x1f\x8b": ("a gzip archive", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "unpack it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"\xfd7zXZ": ("an xz archive", "unpack it"),
    b"\x89HDF": ("an HDF5 file", _CONVERT),
    b"lmgg": ("a model in the old ggml format", _CONVERT),
    b"fmgg": ("a model in the old ggml format", _CONVERT),
    b"tjgg": ("a model in the old ggml format", _CONVERT),
}


def describe(head: bytes) -> tuple[str, str]:
    """Says what a file is by its first 512 bytes, and what to do about it."""
    lowered = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d{1,20})$", head, re.MULTILINE)
        of = f" of {int(size[1])} bytes" if size else ""
        return (
            f"a git-LFS pointer to a model{of}",
            "run `git lfs pull`, or download the file itself",
        )
    if lowered.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page", "the link led to a login or an error; download the file itself"
    if len(head) < 4 and b"GGUF".startswith(head):
        return f"cut off after {len(head)} bytes", "download it again"
    for magic, answer in _FOREIGN.items():
        if head.startswith(magic):
            return answer
    if head[8:10] == b'{"':
        return "a safetensors file", _CONVERT
    if head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x3a"):
        return "an ONNX model", "use `--backend onnx`"
    if head.isascii() and head.decode("ascii").replace("\n", "").replace("\t", "").isprintable():
        return f"a text file that begins {head[:24].decode('ascii')!r}", _ANOTHER
    return f"a file that begins with the bytes {head[:4].hex(' ')}", _ANOTHER
