"""The table of a report in LaTeX, in the style of booktabs."""

from collections.abc import Sequence

from prunevit.experiments.comparison.saved import UNPRUNED, Measured
from prunevit.experiments.comparison.series import Row, unpruned
from prunevit.experiments.comparison.ties import SHARED, ties
from prunevit.experiments.knob_text import row_label
from prunevit.experiments.report import in_figures

ESCAPES = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
SAME = r"\textsuperscript{=}"  # beside a difference that has not been shown


def latex(measured: Sequence[Measured]) -> str:
    r"""Make one `table*`, over both columns of a paper, for each set of images; `\input` takes them in.

    They need `\usepackage{array,booktabs}`. The last column is the paired difference to the unpruned model, where the
    run has compared them. Speeds that share a letter overlap.

    Args:
        measured: The rows, by their images.
    """
    tables = (_table(each, f"tab:prunevit-{number}") for number, each in enumerate(measured, 1))
    return "% \\usepackage{array,booktabs}\n" + "\n".join(tables)


def escape(text: str) -> str:
    """Escape what LaTeX would read as a command; what is not ASCII needs a Unicode engine or inputenc.

    Args:
        text: Plain text.
    """
    return "".join(ESCAPES.get(sign, sign) for sign in text)


def _table(measured: Measured, label: str) -> str:
    on_cpu = any(row["accelerator"] == "cpu" for row in measured.rows)
    heads = (
        ("Row", r"Top-1, \%", "Agreement,", "GMACs", "Images/s", "Gap,"),
        ("", r"(95\,\% interval)", r"\%", "", "(CPU)" if on_cpu else "", "points"),
    )
    dense = unpruned(measured.rows)
    letters = ties([*dense, *measured.rows])
    notes = [
        f"Gap: to the unpruned model on the same images; {SAME}: no difference shown.",
        *([f"{SHARED[0].upper()}{SHARED[1:]}."] if any(letters) else []),
    ]
    lines = [
        r"\begin{table*}",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{Accuracy on {escape(' '.join(measured.title.split()))}. {' '.join(notes)}}}",
        rf"\label{{{label}}}",
        r"\begin{tabular}{>{\raggedright\arraybackslash}p{.26\linewidth}" + "r" * (len(heads[0]) - 1) + "}",
        r"\toprule",
        *(" & ".join(each) + r" \\" for each in heads),
        r"\midrule",
        *(_line(row, letter, "") for row, letter in zip(dense, letters)),
        *(
            _line(row, letter, _difference(row["name"], measured.pairs))
            for row, letter in zip(measured.rows, letters[len(dense) :])
        ),
        *(rf"{_name(row['name'])} & \multicolumn{{5}}{{l}}{{failed}} \\" for row in measured.failed),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def _name(text: str) -> str:
    """A path may be broken behind a slash."""
    return escape(text).replace("/", r"/\allowbreak ")


def _line(row: Row, letter: str, difference: str) -> str:
    top1 = f"{row['top1']:.2f}"
    if row.get("top1_low") is not None:
        top1 += f" ({row['top1_low']:.1f}--{row['top1_high']:.1f})"
    tied = rf"\textsuperscript{{{letter}}}" if letter else ""
    figures = (
        _number(row["agreement"], 2),
        _number(row["gmacs"], 3),
        ("--" if row["images_per_s"] is None else in_figures(row["images_per_s"])) + tied,
    )
    return " & ".join([_name(row_label(row)), top1, *figures, difference]) + r" \\"


def _difference(name: str, pairs: Sequence[Row]) -> str:
    """Of a row minus its unpruned model, marked where it has not been shown."""
    for pair in pairs:
        if (pair["a"], pair["b"]) == (name, UNPRUNED):
            return f"${pair['difference']:+.2f}$" + (SAME if pair["low"] <= 0 <= pair["high"] else "")
    return ""


def _number(value: float | None, digits: int) -> str:
    return "--" if value is None else f"{value:.{digits}f}"
