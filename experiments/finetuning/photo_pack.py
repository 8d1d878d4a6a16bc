"""Pack class folders of photos small enough to travel, and unpack them for fast reading.

    python -m prunevit.experiments.finetuning.photo_pack pack PHOTOS PACK    PHOTOS/train and /val -> PACK/*.tar
    python -m prunevit.experiments.finetuning.photo_pack unpack PACK PHOTOS  and back

Training photos are stored as WebP of a given short side. Held-out photos are stored as they are, byte for byte, so
that accuracies stay those of the originals. What was WebP is unpacked as PPM, which costs no time to decode.
"""

import argparse
import io
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from prunevit.experiments.images import read_image

Packed = tuple[str, bytes]


def pack(photos: Path, target: Path, side: int, quality: int) -> None:
    """Write `train.tar` and `val.tar`.

    Args:
        photos: Folder with `train/<class>/*` and `val/<class>/*`.
        target: Folder to write to.
        side: Short side of the training photos, px; smaller ones are kept as they are.
        quality: WebP's, of the training photos.
    """
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        files = sorted(path for path in (photos / split).glob("*/*") if path.is_file())
        with ThreadPoolExecutor() as pool:
            small = (split == "train",) * len(files)
            stored = pool.map(_stored, files, small, (side,) * len(files), (quality,) * len(files))
            _write(target / f"{split}.tar", split, zip(files, stored))


def unpack(source: Path, photos: Path) -> None:
    """Write the photos back to class folders.

    Args:
        source: Folder with the two files.
        photos: Folder to write to.
    """
    for split in ("train", "val"):
        with ThreadPoolExecutor() as pool:
            [*pool.map(lambda each: _extract(photos, each), _members(source / f"{split}.tar"))]


def _stored(path: Path, small: bool, side: int, quality: int) -> Packed:
    if not small:
        return path.name, path.read_bytes()
    image = read_image(str(path), path.name)
    scale = min(side / min(image.size), 1.0)
    size = (round(image.width * scale), round(image.height * scale))
    content = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(content, "WEBP", quality=quality)
    return f"{path.stem}.webp", content.getvalue()


def _write(path: Path, split: str, photos: Iterator[tuple[Path, Packed]]) -> None:
    with tarfile.open(path, "w") as tar:
        for source, (name, content) in photos:
            member = tarfile.TarInfo(f"{split}/{source.parent.name}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _members(path: Path) -> Iterator[Packed]:
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()


def _extract(photos: Path, packed: Packed) -> None:
    name, content = packed
    path = photos / name
    if not path.resolve().is_relative_to(photos.resolve()):
        raise ValueError(f"photo_pack: names must stay below the target, got {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".webp":
        Image.open(io.BytesIO(content)).convert("RGB").save(path.with_suffix(".ppm"))
    else:
        path.write_bytes(content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--side", type=int, default=208, help="short side of training photos, px; %(default)s"
    )
    parser.add_argument("--quality", type=int, default=52, help="WebP's, of training photos; %(default)s")
    given = parser.parse_args(arguments)
    if given.action == "pack":
        pack(given.source, given.target, given.side, given.quality)
    else:
        unpack(given.source, given.target)


if __name__ == "__main__":
    main()
