"""Pictures of a benchmark: PNG bars of every place, one file for each quantity."""

from pathlib import Path

from prunevit.experiments.benchmark.measurements import Measurement, Measurements


def draw(figures: Measurements, folder: Path) -> list[Path]:
    """Write one picture for each quantity.

    Args:
        figures: The measurements; those without a value are left out.
        folder: Where the files go.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    written = []
    for number, quantity in enumerate(dict.fromkeys(each.quantity for each in figures)):
        found = [each for each in figures if each.quantity == quantity and each.value is not None]
        if found:
            path = folder / f"figure{number + 1}.png"
            _bars(quantity, found, path)
            written.append(path)
    return written


def _bars(quantity: str, found: list[Measurement], path: Path) -> None:
    """One panel a place: the best mode of each contestant, with its percentiles."""
    from matplotlib.figure import Figure

    places = list(dict.fromkeys(each.place for each in found))
    best = {place: _best([each for each in found if each.place == place]) for place in places}
    heights = [0.6 + 0.22 * len(best[place]) for place in places]
    figure = Figure(figsize=(8, sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(places), squeeze=False, height_ratios=heights)[:, 0]
    for panel, place in zip(panels, places):
        bars = best[place]
        values = [each.value for each in bars if each.value is not None]
        middle = [value.median for value in values]
        spread = [[v.median - v.p20 for v in values], [v.p80 - v.median for v in values]]
        panel.barh(
            [f"{each.contestant} ({each.mode})" for each in bars], middle, xerr=spread, color="#4477aa"
        )
        panel.invert_yaxis()
        panel.set_title(place, fontsize=8)
        panel.tick_params(labelsize=6)
    figure.supxlabel(quantity, fontsize=8)
    figure.savefig(path, dpi=150)


def _best(figures: list[Measurement]) -> list[Measurement]:
    names = dict.fromkeys(each.contestant for each in figures)
    best = [min((e for e in figures if e.contestant == name), key=_median) for name in names]
    return sorted(best, key=_median)


def _median(figure: Measurement) -> float:
    assert figure.value is not None
    return figure.value.median
