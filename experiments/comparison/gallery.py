"""The pictures of a comparison: a few photos, and what each row keeps of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from matplotlib.figure import Figure

from prunevit import RaggedViT
from prunevit.experiments.comparison.pictures import draw, look, write_pictures
from prunevit.experiments.contender import Contender
from prunevit.experiments.data import Batch, EvaluationData, Photos, evenly_spaced


@dataclass(frozen=True)
class Gallery:
    """A few photos and the rows that are drawn on them.

    Attributes:
        photos: The photos.
        names: What each is called.
        models: Those of the rows with a policy that did not fail, by name.
    """

    photos: Batch
    names: Sequence[str]
    models: dict[str, RaggedViT]

    def write(self, folder: Path) -> None:
        """Write a grid over the rows for each photo.

        Args:
            folder: Where the files go.

        Cost:
            A forward pass of each row, and about 0.05 s for each panel.
        """
        write_pictures(folder, self.models, self.photos, self.names)

    def by_row(self) -> dict[str, list[Figure]]:
        """Draw each row alone; as dear as `write`."""
        return {
            name: [draw(photo, [seen]) for photo, seen in zip(self.names, look(name, model, self.photos))]
            for name, model in self.models.items()
        }


def choose(contenders: Sequence[Contender], data: EvaluationData, count: int) -> Gallery | None:
    """Choose photos evenly spaced over the data set.

    Args:
        contenders: The rows, after the pass.
        data: The images; those of a stream cannot be chosen from.
        count: How many.

    Returns:
        None if there is nothing to draw.
    """
    drawn = [each for each in contenders if each.error is None and each.spec.kind == "policy"]
    if not drawn or not count or not isinstance(data.photos, Photos):
        return None
    chosen = [data.chosen[position] for position in evenly_spaced(len(data.chosen), count)]
    photos: Batch = next(iter(replace(data, chosen=chosen).loader(len(chosen), 0)))
    if not len(photos.targets):
        return None
    dtype = next(drawn[0].pruned.parameters()).dtype
    names = [PurePath(data.photos.name(position)).name for position in photos.positions.tolist()]
    photos = photos._replace(images=photos.images.to(dtype))
    return Gallery(photos, names, {each.spec.name: each.pruned for each in drawn})


def clear(folder: Path) -> None:
    """Remove the pictures of a run whose results were replaced.

    Args:
        folder: Where they are, if there are any; other files stay.
    """
    for picture in folder.glob("[0-9][0-9][0-9][0-9][0-9][0-9].png"):
        picture.unlink()
