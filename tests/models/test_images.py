"""Headers of images, and images in messages, whatever a stranger sends."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from vision_gguf import bmp, images, jpeg, picture, png, png_of

from edgespec.errors import UnsupportedError
from edgespec.models.chat import plain_message, render_chat
from edgespec.models.images import (
    MAX_BYTES,
    MAX_PIXELS,
    Sound,
    images_of,
    parts_of,
    read_image,
    shown_in,
    with_parts,
)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(picture(1, 7, 5)), (7, 5)),
        (bmp(picture(1, 7, 5)), (7, 5)),
        (jpeg(), (16, 8)),
        (gif(300, 2), (300, 2)),
    ],
)
def test_sizes_are_read_from_headers(data: bytes, size: tuple[int, int]) -> None:
    image = read_image(data)
    assert (image.width, image.height) == size
    assert image == read_image(bytes([*data]))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no image or sound of a known format"),
        (b"hello", "no image or sound of a known format"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "is WebP"),
        (b"BM" + bytes(40), "no image or sound of a known format"),
        (png(picture(1))[:20], "broken or cut off"),
        (png(picture(1))[:30], "cut off"),
        (png(picture(1))[:70], "cut off"),
        (b"\xff\xd8\xff\xe0\x00\x10", "cut off"),
        (b"\xff\xd8\xff\xd9" + bytes(30), "of a kind that is not read"),
        (b"\xff\xd8\xff" + b"\xff\xda\x00\x02" * 200, "too many scans"),
        (gif(0, 5), "no pixels"),
        (gif(65535, 65535), "65535 x 65535 pixels, and 16 million are the limit"),
        (png_of(1 << 20, 1 << 20, b""), "pixels, and 16 million"),
        (png_of(1, 1 << 20, b""), "1 x 1048576 pixels, and 65535 a side are the limit"),
        (png_of(4, 4, zlib.compress(bytes(1 << 24))), "more data than pixels"),
        (png_of(4, 4, b"nothing"), "broken"),
    ],
)
def test_what_is_no_image_is_one_sentence(data: bytes, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told) as problem:
        read_image(data)
    assert "\n" not in str(problem.value)


def test_a_large_png_is_not_inflated_as_a_whole() -> None:
    """128 MiB in 128 KiB."""
    packer = zlib.compressobj(9)
    block = bytes(1 << 24)
    data = b"".join(packer.compress(block) for _ in range(8)) + packer.flush()
    with pytest.raises(UnsupportedError, match="more data than pixels"):
        read_image(png_of(100, 100, data))


def test_files_and_addresses(tmp_path: Path) -> None:
    data = images(1)[0]
    path = tmp_path / "one.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert read_image(path) == read_image(str(path)) == read_image(url) == read_image(data)
    for address in ("https://a.org/x.png", "http://[::1]/x", "file:///etc/passwd", "data:,x"):
        with pytest.raises(UnsupportedError, match="not fetched from addresses"):
            read_image(address)
    with pytest.raises(UnsupportedError, match="no base64"):
        read_image("data:image/png;base64,%%%")
    with pytest.raises(UnsupportedError, match="cannot read "):
        read_image(tmp_path)
    with pytest.raises(UnsupportedError, match="cannot read "):
        read_image("a\0b")
    (tmp_path / "huge").write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(UnsupportedError, match="more than 32 MiB"):
        read_image(tmp_path / "huge")
    assert MAX_PIXELS == 1 << 24


def test_mutated_headers_are_one_error() -> None:
    source = random.Random(1)
    whole = [png(picture(1, 40, 30)), bmp(picture(1, 9, 9)), jpeg(), gif(9, 9) + bytes(40)]
    for number in range(2000):
        data = bytearray(whole[number % len(whole)])
        for _ in range(source.randint(1, 6)):
            data[source.randrange(min(len(data), 60))] = source.randrange(256)
        if source.random() < 0.3:
            del data[source.randrange(len(data)) :]
        try:
            image = read_image(bytes(data))
        except UnsupportedError:
            continue
        assert isinstance(image, Sound) or 0 < image.width * image.height <= MAX_PIXELS


# -- messages ------------------------------------------------------------------------------


def test_images_of_a_message_are_marks_in_its_text() -> None:
    one, other = map(read_image, images(2))
    content: list[Any] = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": one},
        {"type": "image", "image": other},
        {"type": "text", "text": "b"},
        {"type": "image", "image": one},
    ]
    message = {"role": "user", "content": content}
    plain = plain_message(message)
    assert plain["content"] == f"a{one.mark}{other.mark}b{one.mark}"
    assert images_of([message, "no message", {"role": "user"}]) == (one, other)
    assert parts_of(plain["content"], [one]) == ["a", one, f"{other.mark}b", one, ""]
    assert with_parts(plain, [one, other])["content"] == content
    assert with_parts(plain, []) == plain
    assert shown_in(plain["content"], [other]) == [other] and not shown_in("a", [other])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "source": {"type": "url", "url": "https://a.org"}},
        {"type": "image", "source": {"type": "file", "file_id": "x"}},
        {"type": "image_url", "image_url": {"url": 3}},
        {"type": "input_image", "file_id": "x"},
        {"type": "image", "image": b""},
    ],
)
def test_parts_without_an_image_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        plain_message({"role": "user", "content": [part]})


TEMPLATES = [  # forms that templates of models that see have
    "{% for m in messages %}{{ m['role'] }}{% if m['content'][0]['type'] == 'image' %}:{% endif %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}<image>"
    "{% endif %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] | trim }}{% endfor %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_keep_the_place_of_an_image(template: str) -> None:
    """Also where the last words of a user are in the template by chance."""
    image = read_image(images(1)[0])
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
    asked: dict[str, Any] = {"role": "user", "content": parts}
    answered: list[dict[str, Any]] = [
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "u"},
    ]
    for messages in ([asked], [asked, *answered]):
        text = render_chat(template, messages, bos_token="", eos_token="")
        assert f"{image.mark}What is this?" in text
        assert len(messages) == 1 or text.index("A cat.") < text.rindex("u")
