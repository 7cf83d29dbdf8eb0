"""Tiny models that hear, with random weights, and sounds for them."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
from random_gguf import F32, WIDTH, finish, write_model
from vision_gguf import TEMPLATE, begun_clip, clip_values

# By name: the text model's architecture, and what stands around a sound.
HEARING = {"ultravox": ("llama", ()), "qwen2a": ("qwen2", ("<|audio_bos|>", "<|audio_eos|>"))}
_HIDDEN, _LAYERS, _MEL = 64, 2, 16


def write_hearing(
    folder: Path, name: str, seed: int = 7, width: int = 32, stack: int = 4
) -> tuple[Path, Path]:
    """A text model that reads bytes, and beside it a projector that only hears.

    `stack` rows of `width` values are one token of Ultravox's.
    """
    arch, around = HEARING[name]
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(
        folder / f"{name}.gguf",
        arch,
        F32,
        seed,
        reads_bytes=True,
        controls=("<|start|>", "<|end|>", *around),
        template=TEMPLATE,
    )
    path = folder / f"mmproj-{name}.gguf"
    return model, _write_projector(path, name, seed, width, stack)


def _write_projector(path: Path, name: str, seed: int, width: int, stack: int) -> Path:
    source = np.random.default_rng(seed)
    keys = {
        "embedding_length": width,
        "attention.head_count": 2,
        "feed_forward_length": _HIDDEN,
        "block_count": _LAYERS,
        "projection_dim": WIDTH,
        "num_mel_bins": _MEL,
        **({"projector.stack_factor": stack} if name == "ultravox" else {}),
        "attention.layer_norm_epsilon": 1e-5,
    }
    writer = begun_clip(path, name, "audio", keys)
    for tensor, shape in _shapes(name, width, stack).items():
        is_norm = "norm" in tensor or ".ln" in tensor or "_ln" in tensor
        data = clip_values(source, tensor, shape, is_norm=is_norm)
        is_conv = "conv" in tensor and len(shape) == 3
        writer.add_tensor(tensor, data.astype(np.float16) if is_conv else data)
    finish(writer)
    return path


def _shapes(name: str, width: int, stack: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes, as numpy has them, of all tensors of a projector."""
    shapes: dict[str, tuple[int, ...]] = {
        "a.conv1d.1.weight": (width, _MEL, 3),
        "a.conv1d.1.bias": (width, 1),
        "a.conv1d.2.weight": (width, width, 3),
        "a.conv1d.2.bias": (width, 1),
        "a.position_embd.weight": (1500, width),
        "a.post_ln.weight": (width,),
        "a.post_ln.bias": (width,),
    }
    for layer in range(_LAYERS):
        block = f"a.blk.{layer}."
        shapes |= {f"{block}attn_{one}.weight": (width, width) for one in ("q", "k", "v", "out")}
        shapes |= {f"{block}attn_{one}.bias": (width,) for one in ("q", "v", "out")}
        shapes |= {f"{block}{norm}.{of}": (width,) for norm in ("ln1", "ln2") for of in _PARTS}
        shapes |= {f"{block}ffn_up.weight": (_HIDDEN, width), f"{block}ffn_up.bias": (_HIDDEN,)}
        shapes |= {f"{block}ffn_down.weight": (width, _HIDDEN), f"{block}ffn_down.bias": (width,)}
    if name == "qwen2a":
        return shapes | {"mm.a.fc.weight": (WIDTH, width), "mm.a.fc.bias": (WIDTH,)}
    return shapes | {
        "mm.a.norm_pre.weight": (width * stack,),
        "mm.a.mlp.1.weight": (_HIDDEN, width * stack),
        "mm.a.norm_mid.weight": (_HIDDEN // 2,),
        "mm.a.mlp.2.weight": (WIDTH, _HIDDEN // 2),
    }


_PARTS = ("weight", "bias")


# -- sounds --------------------------------------------------------------------------------


def samples(seed: int, seconds: float = 1.0, rate: int = 16000) -> Any:
    """Some tones and noise, [n] of 16 bits, another one for each seed."""
    source, times = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * hertz * times) for hertz in source.uniform(100, 3000, 3))
    return (4000 * tones + source.normal(0, 300, len(times))).astype("<i2")


def wav(values: Any, rate: int = 16000, channels: int = 1) -> bytes:
    """A WAV file of 16-bit samples."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(values, channels).tobytes())
    return made.getvalue()


def wav_of(code: int, bits: int, rate: int, size: int, data: bytes) -> bytes:
    """A WAV file that says it has this format and so many bytes, whatever its data are."""
    frame = bits // 8
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, code, 1, rate, rate * frame, frame, bits)
    body = b"WAVE" + head + struct.pack("<4sI", b"data", size) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def mp3(frames: int = 40, seed: int = 3) -> bytes:
    """An MP3 file: headers of 128 kbit/s at 44.1 kHz, mostly silent side information."""
    made = np.zeros((frames, 417), np.uint8)
    made[:, :4] = 0xFF, 0xFB, 0x90, 0x64
    made[:, 44:64] = np.random.default_rng(seed).integers(0, 250, (frames, 20), np.uint8)
    return made.tobytes()


def flac(values: Any, rate: int = 16000) -> bytes:
    """A FLAC file of 16-bit samples as they are, in blocks of 4096."""
    blocks = [values[place : place + 4096] for place in range(0, len(values), 4096)]
    high = rate << 44 | 0 << 41 | 15 << 36 | len(values)
    stream = struct.pack(">HH", 4096, 4096) + bytes(6) + high.to_bytes(8, "big") + bytes(16)
    made = b"fLaC\x80" + len(stream).to_bytes(3, "big") + stream
    for number, block in enumerate(blocks):
        head = b"\xff\xf8\x70\x08" + bytes([number]) + struct.pack(">H", len(block) - 1)
        frame = head + bytes([_crc(head, 8, 0x07)]) + b"\x02" + block.astype(">i2").tobytes()
        made += frame + _crc(frame, 16, 0x8005).to_bytes(2, "big")
    return made


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    value, most = 0, (1 << bits) - 1
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = ((value << 1) ^ (polynomial if value >> (bits - 1) else 0)) & most
    return value
