"""Inputs and the independent oracle of the tests of `gather`: a loop over rows in fp64."""

import math
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor

from prunevit.kernels.gather import Gathered, gather_reference

FOLDS = ("none", "one heir", "selection", "pairs", "few heirs", "long lists", "anything")
LISTS = (1, 8, 9, 60, 300)
"""Members of the heirs of an image in "long lists", as far as the image has rows."""
FOLDED = ("size", "key_weight")


def make_gather_case(
    lengths: list[int],
    channels: int,
    dtype: torch.dtype,
    fold: str,
    *,
    spare: int = 0,
    dead_rows: int = 0,
    absent: tuple[str, ...] = (),
    device: str = "cpu",
) -> dict[str, Any]:
    """Draw the arguments of `gather`: rows with NaN wherever nothing may be read, and `spare` dead rows to fill.

    "one heir" folds all rows that leave an image into one; "selection" does so as `select` does, and says so;
    "pairs" folds most of them into rows that stay, "few heirs" all of them into the first row of a third of the
    image; "long lists" lets any rows join a few that stay, of which every second joins itself; "anything" lets kept
    rows join others or nobody, and rows join what does not stay.
    """
    generator = torch.Generator().manual_seed(sum(lengths) + channels)
    live = sum(lengths)
    num_rows = live + dead_rows
    starts = torch.tensor([0, *lengths]).cumsum(0)
    image_id = torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([*lengths, dead_rows]))
    kept = torch.rand(num_rows, generator=generator) < 0.5
    kept[starts[:-1][torch.tensor(lengths) > 0]] = True
    kept[live:] = False
    row = torch.arange(num_rows)
    partner = _random_partner(image_id, starts, generator)
    if fold == "few heirs":
        third = torch.tensor([*lengths, 3])[image_id].div(3, rounding_mode="floor").clamp(min=1)
        partner -= (partner - starts[image_id]) % third
        kept |= ((row - starts[image_id]) % third == 0) & (row < live)
    plain = kept
    if fold in ("one heir", "selection"):
        heir = starts[image_id] + (torch.tensor([*lengths, 0])[image_id] > 1)
        plain = kept & (row != heir)
        kept = kept | ((row == heir) & (row < live))
        merge_into = torch.where(kept, row, heir)
    else:
        merge_into = torch.where(kept[partner], partner, -1)
        merge_into = torch.where(kept, row, merge_into)
    if fold == "anything":
        merge_into = torch.where(torch.rand(num_rows, generator=generator) < 0.4, partner, merge_into)
        merge_into[::7] = -1
    if fold == "long lists":
        merge_into = torch.where(kept, row, -1)
        for start, length in zip(starts.tolist(), lengths):
            shuffled = start + torch.randperm(length, generator=generator)
            heirs = shuffled[kept[shuffled]][: len(LISTS)]
            joining = shuffled[~torch.isin(shuffled, heirs)]
            places = torch.arange(len(heirs)).repeat_interleave(torch.tensor(LISTS)[: len(heirs)])[
                : len(joining)
            ]
            merge_into[joining[: len(places)]] = heirs[places]
            merge_into[heirs[::2]] = -1
    merge_into[live:] = -1

    def rows(*shape: int) -> Tensor:
        values = torch.rand(num_rows, *shape, generator=generator, dtype=torch.float64) - 0.4
        values[live:] = math.nan
        return values

    x = rows(channels).to(dtype)
    x[~kept & (merge_into < 0)] = math.nan
    seqlens = torch.stack([kept[a : a + n].sum() for a, n in zip(starts.tolist(), lengths)])
    cu_new = torch.cat([torch.zeros(1, dtype=torch.int64), seqlens.cumsum(0)]).int()
    destination = torch.where(kept, kept.cumsum(0) - 1 - cu_new[image_id], -1).int()
    wide = torch.promote_types(dtype, torch.float32)
    case: dict[str, Any] = {
        "x": x,
        "image_id": image_id.int(),
        "source": (row - 1).int(),
        "destination": destination,
        "cu_old": starts.int(),
        "cu_new": cu_new,
        "capacity": int(cu_new[-1]) + spare,
        "merge_into": None if fold == "none" else merge_into,
    }
    names = ("size", "key_weight", "soft", "merge_weight", "size_in", "key_weight_in")
    case |= {name: None if name in absent else rows().to(wide) for name in names}
    case["plain"] = plain if fold == "selection" else None
    if fold == "selection" and case["merge_weight"] is not None:
        case["merge_weight"] = torch.where(plain, 1.0, case["merge_weight"])
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in case.items()}


def _random_partner(image_id: Tensor, starts: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a row of the same image for each row."""
    lengths = torch.cat([starts.diff(), torch.ones(1, dtype=torch.int64)])[image_id]
    drawn = torch.rand(len(image_id), generator=generator)
    return (starts[image_id] + (drawn * lengths).long()).clamp(max=len(image_id) - 1)


def loop_gather(case: dict[str, Any]) -> dict[str, Tensor]:
    """Move and fold row by row in fp64."""
    case = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in case.items()}
    capacity, into = case["capacity"], case["merge_into"]
    members_of: dict[int, list[int]] = {row: [] for row in range(-1, len(case["x"]))}
    for row in range(len(case["x"])):
        members_of[row if into is None else int(into[row])].append(row)
    num_rows, channels = case["x"].shape
    ones = torch.ones(num_rows, dtype=torch.float64)
    size = case["size_in"] if case["size_in"] is not None else case["size"]
    weight = ones if case["merge_weight"] is None else case["merge_weight"].double()
    key_weight = case["key_weight"] if case["key_weight_in"] is None else case["key_weight_in"]
    if size is None and into is not None:
        size = ones
    moved: dict[str, Tensor] = {
        "x": torch.zeros(capacity, channels, dtype=torch.float64),
        "image_id": torch.full((capacity,), len(case["cu_new"]) - 1),
        "source": torch.full((capacity,), -1),
    }
    optional = {"size": size, "key_weight": key_weight, "soft": case["soft"]}
    optional = {name: values.double() for name, values in optional.items() if values is not None}
    moved |= {name: torch.zeros(capacity, dtype=torch.float64) for name in optional}
    for row in range(num_rows):
        place, image = int(case["destination"][row]), int(case["image_id"][row])
        new = int(case["cu_new"][image]) + place
        if place < 0 or new >= capacity:
            continue
        members = members_of[row]
        moved["x"][new] = sum(
            (case["x"][i].double() * (1 if into is None else weight[i]) for i in members),
            torch.zeros(channels, dtype=torch.float64),
        )
        moved["image_id"][new], moved["source"][new] = case["image_id"][row], case["source"][row]
        for name, values in optional.items():
            summed = name == "size" or (name == "key_weight" and case["key_weight_in"] is not None)
            moved[name][new] = values[members].sum() if summed else values[row]
    return moved


def assert_gathered(result: Gathered, case: dict[str, Any]) -> None:
    """Equal to the loop where nothing is summed; else within twice the reference's error and a rounding step."""
    oracle = loop_gather(case)
    folds = case["merge_into"] is not None
    floats = {name: v for name, v in result._asdict().items() if v is not None}
    assert floats.keys() == oracle.keys()
    for name, right in oracle.items():
        got = floats[name].cpu()
        if not folds or name in ("image_id", "source", "soft"):
            assert torch.equal(got.to(right.dtype), right), name
            continue
        plain = eager(case)[name]
        step = torch.finfo(got.dtype).eps * right.abs().max().item() if right.numel() else 0.0
        error = (got.double() - right).abs().amax().item() if right.numel() else 0.0
        budget = 2 * (plain.cpu().double() - right).abs().amax().item() + step if right.numel() else 0.0
        print(f"{name}: kernel {error:.3g}, budget {budget:.3g}")
        assert error <= budget, name
    assert result.x.dtype == case["x"].dtype
    assert result.image_id.dtype == result.source.dtype == torch.int32


def draw_members(lengths: list[int], density: float, seed: int) -> dict[str, Any]:
    """Draw the arguments of `list_members`: a share of the rows joins anyone, a row of another image too, or nobody.

    Sizes and weights are multiples of 1/4, whose sums are exact.
    """
    generator = numpy.random.default_rng(seed)
    live, dead_rows = sum(lengths), 3
    into = numpy.arange(live + dead_rows)
    moves = generator.random(live + dead_rows) < density
    into[moves] = generator.integers(-1, live + dead_rows, moves.sum())
    near = moves & (generator.random(live + dead_rows) < 0.9)
    image = numpy.repeat(numpy.arange(len(lengths) + 1), [*lengths, dead_rows])
    starts = numpy.concatenate([[0], numpy.cumsum(lengths)])
    extent = numpy.array([*lengths, dead_rows])[image]
    # The square crowds heirs, so that lists are long and short.
    into[near] = (starts[image] + (generator.random(live + dead_rows) ** 2 * extent).astype(int))[near]
    values = generator.integers(1, 40, (2, live + dead_rows)) / 4
    return {
        "merge_into": torch.from_numpy(into),
        "cu_old": torch.from_numpy(starts).int(),
        "size": torch.from_numpy(values[0]).float(),
        "key_weight": torch.from_numpy(values[1]).float(),
    }


def assert_members(found: Any, case: dict[str, Any]) -> None:
    """Equal to lists that are searched for row by row, and to sums in fp64."""
    into, bounds = case["merge_into"].numpy(), case["cu_old"].tolist()
    stops, lists = found.lists.cpu().numpy()
    size = found.size.cpu()
    key_weight = None if found.key_weight is None else found.key_weight.cpu()
    values = {
        name: numpy.ones(len(into)) if case[name] is None else case[name].double().numpy() for name in FOLDED
    }
    for begin, end in pairwise(bounds):
        image = numpy.arange(begin, end)
        for row in image:
            joining = image[into[begin:end] == row]
            others = joining[joining != row]
            start = begin if row == begin else stops[row - 1]
            assert lists[start : stops[row]].tolist() == others.tolist()
            assert size[row] == values["size"][joining].sum()
            if key_weight is not None:
                assert key_weight[row] == values["key_weight"][joining].sum()
    assert (key_weight is None) == (case["key_weight"] is None)


def eager(case: dict[str, Any]) -> dict[str, Tensor]:
    """Compute the reference in the dtype of the case."""
    size = case["size"] if case["size_in"] is None else case["size_in"]
    key_weight = case["key_weight"] if case["key_weight_in"] is None else case["key_weight_in"]
    order = ("soft", "destination", "cu_old", "cu_new", "capacity", "merge_into", "merge_weight", "plain")
    folds_key_weight = case["merge_into"] is not None and case["key_weight_in"] is not None
    arguments: list[Any] = [case["x"], case["image_id"], case["source"], size, key_weight]
    arguments += [*(case[name] for name in order), folds_key_weight]
    x, ids, *rest = gather_reference(*arguments)
    names = [
        name
        for name, there in {
            "size": size is not None or case["merge_into"] is not None,
            "key_weight": key_weight is not None,
            "soft": case["soft"] is not None,
        }.items()
        if there
    ]
    return {"x": x, "image_id": ids[0], "source": ids[1], **dict(zip(names, rest))}
