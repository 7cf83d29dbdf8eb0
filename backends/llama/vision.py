"""Images through llama.cpp's libmtmd: how many cells they take, and their embeddings.

What an image becomes is asked with an empty bitmap of its size. Its pixels are decoded when they
are read, and once before, so that a broken file is refused by whoever sent it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Embeddings, ImageRun
from edgespec.backends.llama.library import LIBRARY_LOG, interrupts_kept, library, set_params
from edgespec.backends.llama.team import TEAMS
from edgespec.errors import BackendError, MissingDependencyError, UnsupportedError
from edgespec.memory.bytes.projector import KEPT_BYTES, Buffers
from edgespec.memory.device.llama_binary import import_functions
from edgespec.models.gguf.access import read_part
from edgespec.models.gguf.reader import Gguf
from edgespec.models.images import Image, Sound
from edgespec.models.projector import read_projector

_MOST_KNOWN = 64  # images that decode, and whose pieces are known
_INT32 = 1 << 31
_BYTES = ctypes.POINTER(ctypes.c_uint8)
# From the pixels of a file, [height, width, 3], to what is shown, by the numbers of EXIF.
_TURNS: dict[int, Callable[[Any], Any]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels[::-1].transpose(1, 0, 2),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: pixels[:, ::-1].transpose(1, 0, 2),
}
_FLOATS = {"F32": "<f4", "F16": "<f2"}


class Vision:
    """A projector beside a model that is loaded. Raises BackendError with libmtmd's words.

    Args:
        path: of the projector's file.
        model: llama.cpp's handle, which is freed later than this one.
        in_use: what keeps the model from being freed within; raises where it was.
        threads: that encode an image.
        on_gpu: whether the projector lies on a GPU, if there is one.
        max_tokens: most cells of an image; None for as many as the projector says.
    """

    def __init__(
        self,
        path: Path,
        model: Any,
        in_use: Callable[[], Any],
        *,
        threads: int,
        on_gpu: bool,
        max_tokens: int | None = None,
    ) -> None:
        self._lib, self._in_use = mtmd(), in_use
        self._pieces: OrderedDict[str, list[list[int] | ImageRun]] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int], Embeddings] = OrderedDict()
        self._lock, self._decoding = threading.RLock(), threading.Lock()
        self._threads = threads
        self._most_tokens = 0  # of what was encoded so far, at once
        self._is_on_gpu = on_gpu and bool(library().llama_supports_gpu_offload())
        self._context: Any = None
        projector = read_projector(path)
        self._row_end = _row_end(projector.file)
        params = self._lib.mtmd_context_params_default()
        set_params(params, use_gpu=on_gpu, n_threads=threads, print_timings=False)
        if max_tokens is not None:
            set_params(params, image_max_tokens=max_tokens)
        LIBRARY_LOG.clear()
        with interrupts_kept():
            self._context = self._lib.mtmd_init_from_file(os.fsencode(path), model, params)
        if not self._context:
            said = LIBRARY_LOG.problem() or "no reason"
            self.close()
            raise BackendError(
                f"llama.cpp cannot use {path.name} with this model: {said}",
                hint="--mmproj names the projector (mmproj) of the same model",
            )
        side = LIBRARY_LOG.warmup_side // projector.patch_size
        patches = side**2 if projector.sees else projector.patches(None)
        self._buffers = Buffers(sum(LIBRARY_LOG.buffer_bytes().values()), max(1, patches))
        self._name, self.sees, self.hears = path.name, projector.sees, projector.hears
        self._projector = projector
        self.uses_sections = bool(self._lib.mtmd_decode_use_mrope(self._context))
        self.is_causal = not self._lib.mtmd_decode_use_non_causal(self._context, None)
        self.width = int(library().llama_model_n_embd_inp(model))

    # -- what an image becomes -------------------------------------------------------------

    def pieces(self, image: Image) -> list[list[int] | ImageRun]:
        """Token ids and runs of cells. Raises UnsupportedError for one that cannot be decoded."""
        if not (self.hears if isinstance(image, Sound) else self.sees):
            does, lacks = ("hears", "image") if self.hears else ("sees", "sound")
            raise UnsupportedError(
                f"the projector {self._name} {does} alone, and the prompt has {image}",
                hint=f"leave out the {lacks}, or name another model's projector with --mmproj",
            )
        known = self._pieces.get(image.digest)
        if known is not None:
            return [_of(image, piece) for piece in known]
        with self._decoding, self._chunks(image, decoded=True) as chunks:
            made: list[list[int] | ImageRun] = []
            for index, chunk in enumerate(chunks):
                kind = self._lib.mtmd_input_chunk_get_type(chunk)
                if kind == self._lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    made.append(self._text(chunk))
                    continue
                count = int(self._lib.mtmd_input_chunk_get_n_tokens(chunk))
                positions = int(self._lib.mtmd_input_chunk_get_n_pos(chunk))
                made.append(ImageRun(_ids(image, index, count), positions, image, index))
            self._pieces[image.digest] = [_of(replace(image, data=b""), piece) for piece in made]
            while len(self._pieces) > _MOST_KNOWN:
                self._pieces.popitem(last=False)
        return made

    def positions(self, run: ImageRun, first: int) -> NDArray[np.int32]:
        """Of the cells of a run that begins at a position: [1, n], or [4, n] with M-RoPE."""
        count = len(run.ids)
        if not self.uses_sections:
            return np.arange(first, first + count, dtype=np.int32)[None]
        if isinstance(run.image, Sound):
            places = np.arange(first, first + count, dtype=np.int32)
            return np.stack([places, places, places, np.zeros_like(places)])
        with self._chunks(run.image, decoded=False) as chunks:
            tokens = self._lib.mtmd_input_chunk_get_tokens_image(chunks[run.index])
            held = (self._lib.mtmd_decoder_pos * count)()
            self._lib.mtmd_helper_image_get_decoder_pos(tokens, first, held)
        found: NDArray[np.int32] = np.array([[p.t, p.y, p.x, p.z] for p in held], np.int32).T
        return found

    def encode(self, run: ImageRun) -> Future[Embeddings]:
        """Begin to compute the embeddings of a run, in a thread of its own, one after the other.

        A thread that ends gives back its team of OpenMP's, which would slow down steps. On a GPU it
        is done here: beside steps of the same device it was never tried.
        """
        coming: Future[Embeddings] = Future()
        if self._is_on_gpu:
            self._encode(run, coming)
        else:
            threading.Thread(
                target=self._encode, args=(run, coming), name="edgespec-encoder", daemon=True
            ).start()
        return coming

    def _encode(self, run: ImageRun, coming: Future[Embeddings]) -> None:
        with self._lock:
            if not coming.set_running_or_notify_cancel():
                return
            try:
                coming.set_result(self.embeddings(run))
            except BaseException as problem:  # whoever reads the image is told
                coming.set_exception(problem)

    def embeddings(self, run: ImageRun) -> Embeddings:
        """Of the cells of a run, [n, width]."""
        key = run.image.digest, run.index
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            with self._chunks(run.image, decoded=True) as chunks:
                found = self._encoded(chunks[run.index], len(run.ids))
            self._kept[key] = found
            while sum(one.nbytes for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return found

    def _encoded(self, chunk: Any, count: int) -> Embeddings:
        LIBRARY_LOG.clear()
        try:
            TEAMS.enter(self._threads)  # which leaves fewer to steps
            with interrupts_kept():
                status = self._lib.mtmd_encode_chunk(self._context, chunk)
        finally:
            TEAMS.leave()
        if status != 0:
            raise BackendError(
                f"llama.cpp cannot encode an image: {LIBRARY_LOG.problem() or status}"
            )
        self._most_tokens = max(self._most_tokens, count)
        address = self._lib.mtmd_get_output_embd(self._context)
        found: Embeddings = np.ctypeslib.as_array(address, (count, self.width)).copy()
        broken = ~np.isfinite(found).all(axis=1)
        if self._row_end is not None:
            # Pixtral's graph adds it to memory times 0, which is no number where nothing has
            # written that memory.
            found[broken] = self._row_end
        elif broken.any():
            raise BackendError("llama.cpp computes embeddings of an image that are no numbers")
        return found

    def memory_bytes(self) -> dict[str, int]:
        """What libmtmd says it allocated, what images have needed since, and embeddings."""
        projector, work = self._projector, 0
        if self._most_tokens:
            patches = projector.patches_of(self._most_tokens)
            work = self._buffers.further_bytes(projector, patches, on_gpu=self._is_on_gpu)
        kept = sum(one.nbytes for one in [*self._kept.values()])  # an encoder may add one
        return {
            "projector": projector.weight_bytes,
            "projector_compute": self._buffers.nbytes,
            "projector_work": work,
            "images": kept + 4 * self.width * self._most_tokens,
        }

    def close(self) -> None:
        """Free the projector, when what is being encoded has ended; safe to call twice."""
        with self._lock:
            if self._context:
                self._lib.mtmd_free(self._context)
            self._context = None
            self._kept.clear()

    # -- libmtmd ---------------------------------------------------------------------------

    def _bitmap(self, image: Image) -> Any:
        """A decoded image, upright."""
        lib = self._lib
        data = (ctypes.c_uint8 * len(image.data)).from_buffer_copy(image.data)
        bitmap = lib.mtmd_helper_bitmap_init_from_buf(self._context, data, len(data), False)
        if bitmap and isinstance(image, Sound):
            count = lib.mtmd_bitmap_get_n_bytes(bitmap) // 4
            address = ctypes.cast(lib.mtmd_bitmap_get_data(bitmap), ctypes.POINTER(ctypes.c_float))
            if lib.mtmd_bitmap_is_audio(bitmap) and count > 1:  # of one sample it aborts
                if np.isfinite(np.ctypeslib.as_array(address, (count,))).all():
                    return bitmap
            lib.mtmd_bitmap_free(bitmap)
        elif bitmap:
            size = lib.mtmd_bitmap_get_nx(bitmap), lib.mtmd_bitmap_get_ny(bitmap)
            shown = size[::-1] if image.is_on_its_side else size
            if shown == (image.width, image.height) and not lib.mtmd_bitmap_is_audio(bitmap):
                if image.turn == 1:
                    return bitmap
                file = np.ctypeslib.as_array(lib.mtmd_bitmap_get_data(bitmap), (*size[::-1], 3))
                pixels = np.ascontiguousarray(_TURNS[image.turn](file))
                lib.mtmd_bitmap_free(bitmap)
                return lib.mtmd_bitmap_init(*shown, pixels.ctypes.data_as(_BYTES))
            lib.mtmd_bitmap_free(bitmap)
        what, format = ("sound", "WAV") if isinstance(image, Sound) else ("image", "PNG or JPEG")
        raise UnsupportedError(
            f"the {what} is broken: it cannot be decoded", hint=f"save it again, as {format}"
        )

    @contextmanager
    def _chunks(self, image: Image, *, decoded: bool) -> Iterator[Sequence[Any]]:
        """What libmtmd makes of an image, until the end; without pixels unless `decoded`."""
        lib = self._lib
        with self._in_use():
            marker = lib.mtmd_get_marker(self._context)
            text = lib.mtmd_input_text()
            set_params(
                text, text=marker, text_len=len(marker), add_special=False, parse_special=True
            )
            empty = lib.mtmd_bitmap_init(image.width, image.height, None) if not decoded else None
            bitmap, made = empty or self._bitmap(image), lib.mtmd_input_chunks_init()
            try:
                LIBRARY_LOG.clear()
                bitmaps = (ctypes.c_void_p * 1)(bitmap)
                if lib.mtmd_tokenize(self._context, made, ctypes.byref(text), bitmaps, 1):
                    reason = LIBRARY_LOG.problem() or "no reason"
                    raise UnsupportedError(f"{image} cannot be prepared for this model: {reason}")
                count = lib.mtmd_input_chunks_size(made)
                yield [lib.mtmd_input_chunks_get(made, place) for place in range(count)]
            finally:
                lib.mtmd_input_chunks_free(made)
                lib.mtmd_bitmap_free(bitmap)

    def _text(self, chunk: Any) -> list[int]:
        count = ctypes.c_size_t()
        ids = self._lib.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        found = list(ids[: count.value])
        if min(found, default=0) < 0:
            raise UnsupportedError(
                "the model's vocabulary lacks tokens that its projector puts around images",
                hint="--mmproj names the projector (mmproj) of the same model",
            )
        return found


def _of(image: Image, piece: list[int] | ImageRun) -> list[int] | ImageRun:
    """A piece of an image with these bytes."""
    return replace(piece, image=image) if isinstance(piece, ImageRun) else piece


def _row_end(file: Gguf) -> NDArray[np.float32] | None:
    """The embedding that ends a row of an image, where a projector has one."""
    for tensor in file.tensors:
        if tensor.name == "v.token_embd.img_break" and tensor.type.name in _FLOATS:
            with file.path.open("rb") as opened:
                data = read_part(opened, tensor.offset, tensor.data_bytes)
            return np.frombuffer(data, _FLOATS[tensor.type.name]).astype(np.float32)
    return None


def _ids(image: Image, index: int, count: int) -> tuple[int, ...]:
    """Negative numbers of 31 bits, another run for each piece of each image."""
    seed = f"{image.digest} {index} {count}".encode()
    data = hashlib.shake_128(seed).digest(4 * count)
    return tuple(int(one) - _INT32 for one in np.frombuffer(data, "<u4") & (_INT32 - 1))


def mtmd() -> ModuleType:
    """libmtmd's low-level module. Raises MissingDependencyError, and as `library`."""
    library()
    try:
        mtmd_cpp = import_functions("mtmd_cpp")
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as problem:
        raise MissingDependencyError(
            f"llama-cpp-python has no libmtmd, which images need: {problem}",
            hint="pip install --force-reinstall --no-deps llama-cpp-python==0.3.36",
        ) from problem
    mtmd_cpp.mtmd_helper_log_set(library().edgespec_log_callback, None)
    return mtmd_cpp
