"""Reading of one image file into upright 8-bit RGB.

What is done with each kind, so that accuracies compare with those published for timm's models:
greyscale is repeated over the channels; CMYK is converted by Pillow; an alpha channel is dropped, as timm and
torchvision do, not composited; 16 bits keep their high byte, which is what Pillow does to 16-bit RGB;
the EXIF orientation is applied; of an animation the first frame is taken.
"""

import struct
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# Endings of photos, drawings and scans; which of them Pillow opens depends on how it was built.
ENDINGS = (
    *(
        ".apng",
        ".avif",
        ".bmp",
        ".dib",
        ".gif",
        ".j2k",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpf",
        ".jpg",
        ".jpx",
    ),
    *(".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
)

# What Pillow raises on files that are broken, cut off, or of a size that no photo has.
UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, struct.error, Image.DecompressionBombError)


class ImageError(Exception):
    """An image file that cannot be read."""


def readable_endings() -> tuple[str, ...]:
    """Those of `ENDINGS` that this Pillow opens."""
    formats = Image.registered_extensions()  # loads all of Pillow's readers
    return tuple(ending for ending in ENDINGS if formats.get(ending) in Image.OPEN)


def read_image(file: str | IO[bytes], name: str) -> Image.Image:
    """Read an image.

    Args:
        file: Path or open binary file.
        name: How messages call it.

    Returns:
        A PIL image of mode RGB.

    Raises:
        ImageError: Names the file and the reason.
    """
    try:
        with Image.open(file) as image:
            image.load()
            return to_rgb(upright(image))
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not a readable image (empty or in no known format)") from error
    except UNREADABLE as error:
        raise ImageError(f"{name}: not a readable image ({str(error) or type(error).__name__})") from error


def upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; EXIF data that cannot be parsed says nothing.

    Args:
        image: Any PIL image.
    """
    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, TypeError, struct.error):
        return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB.

    Args:
        image: Any PIL image.

    Raises:
        ValueError: If its pixels are floating-point numbers, which have no agreed range.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range")
    if image.mode.startswith("I"):
        # Pillow's own conversion would clip at 255 instead of scaling.
        high_byte = np.asarray(image).clip(0, 65535) // 256
        image = Image.fromarray(high_byte.astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
