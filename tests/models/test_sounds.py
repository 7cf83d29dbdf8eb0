"""What a sound is, by its first bytes, and what is refused before a decoder sees it."""

from __future__ import annotations

import base64
import struct

import pytest
from sound_gguf import flac, mp3, samples, wav, wav_of

from edgespec.errors import UnsupportedError
from edgespec.models.images import MAX_SECONDS, Image, Sound, image_of, read_image


def sound(data: bytes) -> Sound:
    found = read_image(data)
    assert isinstance(found, Sound)
    return found


def test_lengths_by_headers() -> None:
    assert sound(wav(samples(1, 2.5))).seconds == 2.5
    assert sound(wav(samples(1, 0.5, 44100), 44100, 2)).seconds == 0.5
    assert sound(mp3(40)).seconds == pytest.approx(40 * 1152 / 44100)
    assert 1 <= sound(flac(samples(1))).seconds < 3


LONG = 16000 * 2 * (MAX_SECONDS + 1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (wav_of(1, 16, 1, 4000, bytes(4000)), "2000 seconds of sound, and 600 are the limit"),
        (wav_of(1, 16, 16000, LONG, bytes(64)), "is cut off"),
        (wav_of(1, 16, 16000, 0xFFFFFFFF, bytes(64)), "is cut off"),
        (wav_of(2, 16, 16000, 64, bytes(64)), "a WAV file of a kind that is not read"),
        (wav_of(1, 4, 16000, 64, bytes(64)), "a WAV file of a kind that is not read"),
        (wav_of(1, 16, 0, 64, bytes(64)), "broken or cut off"),
        (wav_of(1, 16, 16000, 0, b""), "it has no sound"),
        (wav(samples(1))[:30], "broken or cut off"),
        (b"RIFF\0\0\0\0AVI " + bytes(40), "no image or sound of a known format"),
        (b"fLaC" + bytes(60), "it has no sample rate"),
        (b"fLaC" + bytes(10), "broken or cut off"),
        (
            b"fLaC\x80\0\0\x22" + bytes(10) + struct.pack(">II", 1 << 12, 1 << 31) + bytes(20),
            "seconds of sound, and 600 are the limit",
        ),
        (mp3(25_000), "seconds of sound, and 600 are the limit"),
        (b"ID3" + bytes(60), "it has no sound"),
    ],
)
def test_what_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said) as caught:
        read_image(data)
    assert caught.value.hint


def test_parts_of_messages() -> None:
    data = wav(samples(1))
    encoded = base64.b64encode(data).decode()
    own = {"type": "audio", "audio": data}
    sent = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    assert image_of(own) == image_of(sent) == sound(data)
    assert image_of(own) != Image(b"", sound(data).digest, 1, 1)


def test_several_in_one_text_are_told_apart() -> None:
    assert sound(wav(samples(1))).mark != sound(wav(samples(2))).mark
