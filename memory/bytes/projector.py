"""How many bytes images take besides the cells of a cache: the projector, and what it computes in.

libmtmd says what its buffers take when a projector was loaded, which is kept. Before that it is
estimated from the sizes of the network.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.memory.bytes.footprint import Component
from edgespec.memory.bytes.shape import GPU, HOST
from edgespec.memory.store import cache
from edgespec.models.images import MAX_PIXELS
from edgespec.models.projector import Projector

KEPT_BYTES = 64 << 20  # of embeddings, so that an image that comes again is not computed again
# A decoded image, a copy of it, what a decoder holds beside it (coefficients of a JPEG), and
# another decoded image, which is encoded meanwhile.
_DECODED_BYTES = 15 * MAX_PIXELS
BODY_BYTES = 24 << 20  # of a request with images to a server
MOST_BODIES = 2  # that a server reads at once
# A body, its text, and what was made of it.
_BODIES_BYTES = 3 * BODY_BYTES * MOST_BODIES
_STORE = "projectors"


def projector_parts(
    projector: Projector, most_tokens: int | None, *, on_gpu: bool, serves: bool = False
) -> Iterator[Component]:
    """The components of a projector that encodes images of at most so many tokens.

    Args:
        serves: images come by HTTP.
    """
    place = GPU if on_gpu else HOST
    yield Component("projector", projector.weight_bytes, device=place)
    size = _compute_bytes(projector, projector.patches(most_tokens), on_gpu=on_gpu)
    yield Component("projector_compute", size, is_ceiling=True, device=place)
    sent = _BODIES_BYTES * serves
    yield Component("images", _DECODED_BYTES + KEPT_BYTES + sent, is_ceiling=True)


def _compute_bytes(projector: Projector, patches: int, *, on_gpu: bool) -> int:
    known = cache.load(_STORE, _key(projector, on_gpu=on_gpu)) or {}
    size, measured = known.get("compute_bytes"), known.get("patches")
    if isinstance(size, int) and isinstance(measured, int) and size > 0 < measured:
        times = max(1.0, patches / measured)
        return int(size * (times**2 if projector.windows else times))
    return estimated_bytes(projector, patches)


def estimated_bytes(projector: Projector, patches: int) -> int:
    """Of the buffers for an image: a layer's largest values, the pixels, and masks, in float32."""
    pixels = 3 * patches * projector.patch_size**2
    values = patches * (projector.hidden + 6 * projector.width) + 2 * pixels
    return 4 * values + (6 * patches**2 if projector.windows else 0)


def keep_compute_bytes(projector: Projector, size: int, patches: int, *, on_gpu: bool) -> None:
    """Keep what libmtmd said that its buffers take for an image of so many patches."""
    found = {"compute_bytes": size, "patches": patches}
    cache.store(_STORE, _key(projector, on_gpu=on_gpu), found)


def _key(projector: Projector, *, on_gpu: bool) -> str:
    return f"{projector.file.header_hash} | {'gpu' if on_gpu else 'cpu'}"
