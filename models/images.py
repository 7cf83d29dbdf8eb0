"""Images and sounds in prompts: read from files and messages, and looked at before decoders do.

What an image is, and how large, is read from its first bytes; nothing here decodes pixels, and
nothing is ever fetched. In a prompt's text an image is a mark that has the hash of its bytes, so
that the same text shows the same images. A sound is a piece of a prompt like an image.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.errors import UnsupportedError
from edgespec.models.writing import reason
from edgespec.paths import expanded

MAX_PIXELS = 1 << 24  # of one image; decoding takes up to twelve bytes each
MAX_SIDE = 65535  # libmtmd makes slices of an image by its shape, for minutes of 1 x 16 million
MAX_BYTES = 32 << 20  # of one file
MAX_SECONDS = 600  # of one sound: its samples and their spectrum take 0.3 MB a second
_MOST_SCANS = 100  # of a progressive JPEG, of which each goes through the whole image
_MARK = re.compile("\ufdd2([0-9a-f]{64})\ufdd3")  # no characters of Unicode around the hash
_JPEG_MARKER = re.compile(b"\xff+[^\xff]")
_BMP_HEADERS = {12: "<HH", 40: "<ii", 56: "<ii", 108: "<ii", 124: "<ii"}
KINDS = ("image", "image_url", "input_image", "audio", "input_audio")  # of a message's parts
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_EXIF = re.compile(rb"\xff\xe1..Exif\0\0(II\*\0|MM\0\*)", re.DOTALL)
_MOST_EXIF, _MOST_ENTRIES, _ORIENTATION = 1 << 16, 256, 0x0112  # bytes, entries, a tag
_INFLATED_AT_ONCE = 1 << 20
_FORMATS = "use PNG, JPEG, BMP or GIF"
_SOUNDS = "use WAV, MP3 or FLAC"
_WAV_CODES = (1, 3, 6, 7)  # whole samples; of others the decoder believes what the file says
# The header of a frame: version, layer, and a sample rate that there is.
_MP3_FRAME = re.compile(rb"\xff([\xe2-\xe7\xf2-\xf7\xfa-\xff])([\x00-\xef])", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of an image's file, and what its header says. Equal where the bytes are.

    `width` and `height` are of the image as it is shown; `turn` is how it comes there from the
    pixels of the file, by the numbers of EXIF: 1 is as they are.
    """

    data: bytes = field(repr=False, compare=False)
    digest: str  # SHA-256 of the bytes
    width: int = field(compare=False)
    height: int = field(compare=False)
    turn: int = field(default=1, compare=False)

    @property
    def is_on_its_side(self) -> bool:
        """Whether rows of the file are columns of what is shown."""
        return self.turn > 4

    @property
    def mark(self) -> str:
        """What stands for it in a prompt's text."""
        return f"\ufdd2{self.digest}\ufdd3"

    @property
    def part(self) -> dict[str, Any]:
        """A part of a message that shows it."""
        return {"type": "image", "image": self}

    def __str__(self) -> str:
        return f"an image of {self.width} x {self.height} pixels"


@dataclass(frozen=True, slots=True)
class Sound(Image):
    """The bytes of a sound's file. It stands wherever an image may."""

    seconds: float = field(default=0.0, compare=False)  # a ceiling

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "audio", "audio": self}

    def __str__(self) -> str:
        return f"a sound of {self.seconds:.0f} seconds"


ImageSource = Image | bytes | str | os.PathLike[str]


def read_image(source: ImageSource) -> Image:
    """An image or a sound of a file, of its bytes, or of a `data:` URL; not decoded yet.

    Raises UnsupportedError for what is neither, or is too large.
    """
    if isinstance(source, Image):
        return source
    if isinstance(source, bytes):
        data, name = source, "the file"
    elif isinstance(source, str) and re.match(r"data:|\w+://", source, re.ASCII):
        data, name = _of_url(source), "the file"
    else:
        path = expanded(name := os.fspath(source))
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as problem:
            said = reason(problem) if isinstance(problem, OSError) else str(problem)
            raise UnsupportedError(f"cannot read {path}: {said}") from problem
    if len(data) > MAX_BYTES:
        raise UnsupportedError(f"{name} has more than {MAX_BYTES >> 20} MiB", hint="scale it down")
    is_mp3 = data[:3] == b"ID3" or _MP3_FRAME.match(data) is not None
    is_sound = is_mp3 or (data[:4] in (b"fLaC", b"RIFF") and data[8:12] != b"WEBP")
    try:
        if is_sound:
            return Sound(data, hashlib.sha256(data).hexdigest(), 0, 0, 1, _seconds_of(data))
        width, height = _size_of(data)
    except (struct.error, IndexError, zlib.error) as problem:
        hint = _SOUNDS if is_sound else _FORMATS
        raise UnsupportedError(f"{name} is broken or cut off", hint=hint) from problem
    except UnsupportedError as problem:
        raise UnsupportedError(f"{name} {problem}", hint=problem.hint) from problem
    image = Image(data, hashlib.sha256(data).hexdigest(), width, height, _turn_of(data))
    return replace(image, width=height, height=width) if image.is_on_its_side else image


def _of_url(url: str) -> bytes:
    kind, comma, data = url.partition(",")
    if not kind.startswith("data:") or not comma or not kind.endswith(";base64"):
        raise UnsupportedError(
            f"images are not fetched from addresses, such as {url[:60]!r}",
            hint="send the image itself, as data:image/png;base64,...",
        )
    return of_base64(data)


def of_base64(text: str) -> bytes:
    """The bytes of a file that was sent as text. Raises UnsupportedError."""
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise UnsupportedError(
            f"the file has more than {MAX_BYTES >> 20} MiB", hint="scale it down"
        )
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except (binascii.Error, ValueError) as problem:
        raise UnsupportedError(f"the file is no base64: {problem}") from problem


# -- headers -------------------------------------------------------------------------------


def _size_of(data: bytes) -> tuple[int, int]:
    """Width and height by the header. Raises UnsupportedError, struct.error or IndexError."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
        width, height = struct.unpack_from(">II", data, 16)
    elif data[:3] == b"\xff\xd8\xff":
        width, height = _size_of_jpeg(data)
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        width, height = struct.unpack_from("<HH", data, 6)
    elif data[:2] == b"BM" and data[14:18] and _bmp_header(data) in _BMP_HEADERS:
        width, height = struct.unpack_from(_BMP_HEADERS[_bmp_header(data)], data, 18)
        height = abs(height)
    else:
        what = "is WebP" if data[8:12] == b"WEBP" else "is no image or sound of a known format"
        raise UnsupportedError(what, hint=f"{_FORMATS}; of sounds WAV, MP3 or FLAC")
    if width < 1 or height < 1:
        raise UnsupportedError("is broken: it has no pixels", hint=_FORMATS)
    if width * height > MAX_PIXELS:
        raise UnsupportedError(
            f"has {width} x {height} pixels, and {MAX_PIXELS >> 20} million are the limit",
            hint="scale it down",
        )
    if max(width, height) > MAX_SIDE:
        raise UnsupportedError(
            f"has {width} x {height} pixels, and {MAX_SIDE} a side are the limit",
            hint="cut it into pieces",
        )
    if data[:4] == b"\x89PNG":
        _check_png(data, width, height)
    return width, height


def _bmp_header(data: bytes) -> int:
    return int(struct.unpack_from("<I", data, 14)[0])


def _size_of_jpeg(data: bytes) -> tuple[int, int]:
    """By the first frame. Bytes between markers are passed over, as decoders do."""
    if data.count(b"\xff\xda") > _MOST_SCANS:
        raise UnsupportedError("has too many scans", hint="save it as a plain JPEG")
    place = 2
    while (found := _JPEG_MARKER.search(data, place)) is not None:
        marker, place = data[found.end() - 1], found.end()
        if marker in (0xC0, 0xC1, 0xC2):
            height, width = struct.unpack_from(">HH", data, place + 3)
            return width, height
        if marker not in (0xC4, 0xDB, 0xDD, 0xFE) and not 0xE0 <= marker <= 0xEF:
            raise UnsupportedError("is a JPEG of a kind that is not read", hint=_FORMATS)
        place += struct.unpack_from(">H", data, place)[0]
    raise UnsupportedError("is cut off", hint=_FORMATS)


def _turn_of(data: bytes) -> int:
    """How a camera was held, by the EXIF data before the first frame of a JPEG; 1 where it says
    nothing."""
    match = _EXIF.search(data, 0, _MOST_EXIF) if data[:3] == b"\xff\xd8\xff" else None
    if match is None:
        return 1
    start, order = match.start(1), "<" if match[1] == b"II*\0" else ">"
    try:
        (place,) = struct.unpack_from(f"{order}I", data, start + 4)
        (count,) = struct.unpack_from(f"{order}H", data, start + place)
        for entry in range(min(count, _MOST_ENTRIES)):
            at = start + place + 2 + 12 * entry
            tag, kind, _, turn = struct.unpack_from(f"{order}HHIH", data, at)
            if (tag, kind) == (_ORIENTATION, 3) and 1 <= turn <= 8:
                return int(turn)
    except struct.error:
        pass
    return 1


def _check_png(data: bytes, width: int, height: int) -> None:
    """Its rows inflate to no more than its pixels take: a decoder would go on to the end."""
    depth, colour = data[24], data[25]
    row = 2 + (width * depth * _PNG_CHANNELS.get(colour, 4) + 7) // 8
    left = row * height * 2 + 64  # interlaced ones have more rows
    stream, place = zlib.decompressobj(), 8
    while place < len(data):
        (size,), kind = struct.unpack_from(">I", data, place), data[place + 4 : place + 8]
        if kind == b"IDAT":
            chunk = data[place + 8 : place + 8 + size]
            while chunk and not stream.eof:
                left -= len(stream.decompress(chunk, _INFLATED_AT_ONCE))
                chunk = stream.unconsumed_tail
                if left < 0:
                    raise UnsupportedError("is broken: it has more data than pixels")
        elif kind == b"IEND":
            return
        place += 12 + size
    raise UnsupportedError("is cut off", hint=_FORMATS)


def _seconds_of(data: bytes) -> float:
    """A ceiling of what a sound takes, by its headers. Raises UnsupportedError or struct.error."""
    if data[:4] == b"RIFF":
        seconds = _seconds_of_wav(data)
    else:
        seconds = _seconds_of_mp3(data)  # frames are looked for in a broken FLAC file, too
        if data[:4] == b"fLaC":
            high, low = struct.unpack_from(">II", data, 18)
            if high >> 12 == 0:
                raise UnsupportedError("is broken: it has no sample rate", hint=_SOUNDS)
            seconds = max(seconds, ((high & 15) << 32 | low) / (high >> 12))
    if seconds <= 0:
        raise UnsupportedError("is broken: it has no sound", hint=_SOUNDS)
    if seconds > MAX_SECONDS:
        raise UnsupportedError(
            f"has {seconds:.0f} seconds of sound, and {MAX_SECONDS} are the limit",
            hint="cut it into pieces",
        )
    return seconds


def _seconds_of_wav(data: bytes) -> float:
    """By its format and the size that it says its samples have, which decoders believe."""
    if data[8:12] != b"WAVE":
        raise UnsupportedError("is no image or sound of a known format", hint=_SOUNDS)
    place, rate, frame = 12, 0, 0
    while place + 8 <= len(data):
        kind, (size,) = data[place : place + 4], struct.unpack_from("<I", data, place + 4)
        place += 8
        if kind == b"fmt " and not rate:
            code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, place)
            if code == 0xFFFE:
                (code,) = struct.unpack_from("<H", data, place + 24)
            if code not in _WAV_CODES or bits % 8 or not 1 <= channels <= 8:
                raise UnsupportedError("is a WAV file of a kind that is not read", hint=_SOUNDS)
            frame = channels * bits // 8
        elif kind == b"data" and rate and frame:
            if size > len(data) - place:
                raise UnsupportedError("is cut off", hint=_SOUNDS)
            return float(size / frame / rate)
        elif kind in (b"fmt ", b"data"):
            break
        place += size + size % 2
    raise UnsupportedError("is broken or cut off", hint=_SOUNDS)


def _seconds_of_mp3(data: bytes) -> float:
    """Of all frames that may begin anywhere: a few more than there are."""
    seconds = 0.0
    for match in _MP3_FRAME.finditer(data):
        version, rate = match[1][0] >> 3 & 3, match[2][0] >> 2 & 3
        if rate < 3:
            hertz = (44100, 48000, 32000)[rate] >> (0 if version == 3 else 1 if version == 2 else 2)
            samples = 576 if version != 3 and match[1][0] >> 1 & 3 == 1 else 1152
            seconds += samples / hertz
    return seconds


# -- messages ------------------------------------------------------------------------------


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image or a sound, by any interface."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def image_of(part: Mapping[str, Any]) -> Image:
    """The image of a part, which is one of

        {"type": "image", "image": an Image, bytes, or a path}
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
        {"type": "input_image", "image_url": "data:image/png;base64,..."}
        {"type": "image", "source": {"type": "base64", "data": "..."}}
        {"type": "audio", "audio": a Sound, bytes, or a path}
        {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}

    Raises UnsupportedError.
    """
    found = part.get("image", part.get("audio"))
    return sent_image(part) if found is None else read_image(found)


def sent_image(part: Mapping[str, Any]) -> Image:
    """The same of a part that a stranger sent, which has its bytes: no file here is read."""
    source, url, sound = part.get("source"), part.get("image_url"), part.get("input_audio")
    if isinstance(sound, Mapping) and isinstance(sound.get("data"), str):
        return read_image(of_base64(sound["data"]))
    if isinstance(source, Mapping):
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return read_image(of_base64(source["data"]))
        url = source.get("url", "")
    elif isinstance(url, Mapping):
        url = url.get("url", "")
    if not isinstance(url, str) or not url:
        what = "a sound" if "input_audio" in part else "an image"
        raise UnsupportedError(f"{what} needs its bytes", hint="in base64")
    return read_image(_of_url(url))


def joined(parts: Iterable[str | Image]) -> str:
    """Texts as lines, with marks of images between them, as llama.cpp's server joins them."""
    text, follows_text = "", False
    for part in parts:
        if isinstance(part, Image):
            text, follows_text = text + part.mark, False
        else:
            text, follows_text = f"{text}\n{part}" if follows_text and text else text + part, True
    return text


def with_marks(parts: Sequence[Any]) -> str | None:
    """The text of parts, with a mark for each image; None where there is something else.

    Raises UnsupportedError for a broken image.
    """
    text = ""
    for part in parts:
        if is_image(part):
            text += image_of(part).mark
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            text += part["text"]
        else:
            return None
    return text


def images_of(messages: Iterable[Any]) -> tuple[Image, ...]:
    """All images of some messages. Raises UnsupportedError for a broken one."""
    found: list[Image] = []
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        found += message.get("images", ())
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str | bytes):
            found += [image_of(part) for part in content if is_image(part)]
    return tuple(dict.fromkeys(found))


def has_images(text: str) -> bool:
    """Whether there are marks of images in a text."""
    return _MARK.search(text) is not None


def parts_of(text: str, images: Iterable[Image]) -> list[str | Image]:
    """A text cut at the marks of these images; the marks of others are text."""
    known = {image.digest: image for image in images}
    made, start = list[str | Image](), 0
    for match in _MARK.finditer(text):
        if match[1] in known:
            made += [text[start : match.start()], known[match[1]]]
            start = match.end()
    return [*made, text[start:]]


def shown_in(text: str, images: Iterable[Image]) -> list[Image]:
    """Those of some images whose marks are in a text."""
    return [image for image in images if image.mark in text]


def with_parts(message: Mapping[str, Any], images: Iterable[Image]) -> dict[str, Any]:
    """A message with parts where its text has marks of these images."""
    cut = parts_of(message["content"], images)
    if len(cut) == 1:
        return dict(message)
    parts = [
        part.part if isinstance(part, Image) else {"type": "text", "text": part}
        for part in cut
        if part
    ]
    return {**message, "content": parts}
