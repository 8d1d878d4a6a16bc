"""Each kind of image file is read into the right pixels, and broken ones are named."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from prunevit.experiments.images import ImageError, read_image


def stored(image: Image.Image, format: str = "PNG", **settings: object) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, format, **settings)  # type: ignore[arg-type]
    file.seek(0)
    return file


def pixels(file: io.BytesIO) -> np.ndarray:
    image = read_image(file, "photo.png")
    assert image.mode == "RGB"
    return np.asarray(image)


def test_rgb_is_unchanged() -> None:
    values = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(pixels(stored(Image.fromarray(values))), values)


def test_greyscale_is_repeated() -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    assert np.array_equal(pixels(stored(Image.fromarray(values))), np.stack([values] * 3, -1))


def test_one_bit() -> None:
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert pixels(stored(image)).tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_keep_the_high_byte(format: str) -> None:
    values = np.array([[0, 255, 256, 0x1234], [0x8000, 0xABCD, 0xFF00, 0xFFFF]], dtype=np.uint16)
    expected = np.array([[0, 0, 1, 0x12], [0x80, 0xAB, 0xFF, 0xFF]], dtype=np.uint8)
    assert np.array_equal(pixels(stored(Image.fromarray(values), format)), np.stack([expected] * 3, -1))


def test_sixteen_bit_rgb_keeps_the_high_byte() -> None:
    rows = b"\0" + struct.pack(">6H", 0x1234, 0x8000, 0xFFFF, 0, 255, 0x0100)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    assert pixels(io.BytesIO(png)).tolist() == [[[0x12, 0x80, 0xFF], [0, 0, 1]]]


def test_alpha_is_dropped_not_composited() -> None:
    image = Image.new("RGBA", (2, 2), (200, 100, 50, 0))
    assert (pixels(stored(image)) == (200, 100, 50)).all()


def test_palette_with_transparency() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    assert pixels(stored(image, transparency=b"\0\xff")).tolist() == [[[10, 20, 30], [200, 100, 50]]]


def test_cmyk() -> None:
    # No ink is white, full cyan removes red, full black is black.
    for ink, colour in {
        (0, 0, 0, 0): (255, 255, 255),
        (255, 0, 0, 0): (0, 255, 255),
        (0, 0, 0, 255): (0, 0, 0),
    }.items():
        read = pixels(stored(Image.new("CMYK", (16, 16), ink), "JPEG", quality=100))
        assert np.abs(read.astype(int) - colour).max() <= 3


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown after a quarter turn clockwise
    read = pixels(stored(image, exif=exif))
    assert read.shape == (4, 2, 3)
    assert read[0, 1].tolist() == [255, 0, 0]
    assert read.sum() == 255


def test_broken_exif_says_nothing() -> None:
    file = stored(Image.new("RGB", (8, 8), (90, 90, 90)), "JPEG", exif=b"Exif\0\0garbage")
    assert pixels(file).shape == (8, 8, 3)


def test_one_pixel() -> None:
    assert pixels(stored(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


def cut_jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = stored(Image.fromarray(noise), "JPEG").getvalue()
    return data[: len(data) // 2]


@pytest.mark.parametrize("data", [b"", b"not an image", cut_jpeg()], ids=["empty", "text", "cut off"])
def test_broken_files_are_named(data: bytes) -> None:
    with pytest.raises(ImageError, match=r"^folder/photo\.jpg: not a readable image"):
        read_image(io.BytesIO(data), "folder/photo.jpg")


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(ImageError, match="no agreed range"):
        read_image(stored(Image.new("F", (2, 2), 0.5), "TIFF"), "photo.tif")
