"""How many bytes images take besides the cells of a cache: the projector, and what it computes in.

libmtmd makes buffers for an image of some size when it is loaded, and larger ones for a larger
image. It says how large the first ones are without loading anything (`simulation`); where it cannot
be asked they are estimated from the sizes of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgespec.errors import BackendError
from edgespec.memory.bytes.config import GPU, HOST
from edgespec.memory.bytes.footprint import F32, Component
from edgespec.memory.bytes.requests import AT_ONCE
from edgespec.memory.bytes.simulation import simulated_projector
from edgespec.models.images import MAX_PIXELS
from edgespec.models.projector import Projector

KEPT_BYTES = 64 << 20  # of embeddings, so that an image that comes again is not computed again
BODY_BYTES = 24 << 20  # of a request with images to a server
_MASK_BYTES = 6  # of a pair of patches: in float32 and float16


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a projector that is loaded computes in, made for an image of so many patches."""

    nbytes: int
    patches: int

    def further_bytes(self, projector: Projector, patches: int, *, on_gpu: bool) -> int:
        """What an image of so many patches takes besides, once it is encoded.

        Larger buffers, whose masks grow with pairs of patches, and values in the type that weights
        are multiplied with.
        """
        times = max(1.0, patches / self.patches)
        masks = _MASK_BYTES * self.patches**2 if projector.windows else 0
        larger = self.nbytes * (times - 1) + masks * (times**2 - times)
        return int(larger) + (0 if on_gpu else patches * projector.rewritten_bytes)


def projector_parts(
    projector: Projector, most_tokens: int | None, *, on_gpu: bool, serves: bool = False
) -> Iterator[Component]:
    """The components of a projector that encodes images of at most so many tokens.

    Args:
        serves: images come by HTTP.
    """
    place, patches = GPU if on_gpu else HOST, projector.patches(most_tokens)
    buffers = first_buffers(projector, most_tokens, on_gpu=on_gpu)
    further = buffers.further_bytes(projector, patches, on_gpu=on_gpu)
    yield Component("projector", projector.weight_bytes, device=place)
    yield Component("projector_compute", buffers.nbytes, is_ceiling=True, device=place)
    yield Component("projector_work", further, is_ceiling=True, device=place)
    # Embeddings of an image in libmtmd's memory, and in ours while its cells are read.
    embeddings = 2 * F32 * (patches // projector.merge**2) * projector.output
    # A decoded image, a copy of it, what a decoder holds beside it (coefficients of a JPEG), and
    # another decoded image, which is encoded meanwhile.
    decoded = 15 * MAX_PIXELS
    sent = 3 * BODY_BYTES * AT_ONCE * serves  # a body, its text, and what was made of it
    yield Component("images", decoded + KEPT_BYTES + embeddings + sent, is_ceiling=True)


def first_buffers(projector: Projector, most_tokens: int | None, *, on_gpu: bool) -> Buffers:
    """Those that there are when a projector was loaded."""
    try:
        size, side = simulated_projector(projector, most_tokens, on_gpu=on_gpu)
    except BackendError:
        patches = projector.first_patches(most_tokens)
        return Buffers(estimated_bytes(projector, patches), patches)
    return Buffers(size, (side // projector.patch_size) ** 2 or projector.patches(None))


def estimated_bytes(projector: Projector, patches: int) -> int:
    """Of the buffers for an image: a layer's largest values, the pixels, and masks, in float32."""
    pixels = 3 * patches * projector.patch_size**2
    values = patches * (projector.hidden + 6 * projector.width) + 2 * pixels
    return F32 * values + (_MASK_BYTES * patches**2 if projector.windows else 0)
