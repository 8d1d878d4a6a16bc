"""A picture of a plan: how many tokens run through each block."""

from typing import Any

from prunevit.experiments.cost import Cost


def picture(title: str, cost: Cost, dense_gmacs: float) -> Any:
    """Draw the tokens of each half-block over those of the unpruned model.

    Args:
        title: What is planned.
        cost: Its cost.
        dense_gmacs: GMACs of the unpruned model.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    depth = len(cost.mlp_rows)
    halves = [rows for pair in zip(cost.attention_rows, cost.mlp_rows) for rows in pair]
    edges = [number / 2 - 0.5 for number in range(2 * depth + 1)]
    most = cost.attention_rows[0]
    axes.stairs([most] * depth, edges[::2], color="#999999", linestyle="--", label="unpruned")
    axes.stairs(halves, edges, fill=True, color="#56b4e9", alpha=0.6)
    axes.stairs(halves, edges, color="#0072b2", label="pruned")
    for block, rows in enumerate(cost.mlp_rows):
        axes.annotate(f"{rows:.0f}", (block + 0.25, rows), ha="center", va="bottom", fontsize=7)
    axes.set(
        xlabel="block", ylabel="tokens an image", xticks=range(depth), ylim=(0, 1.25 * max([most, *halves]))
    )
    axes.set_title(f"{title}\n{cost.gmacs:.3f} of {dense_gmacs:.3f} GMACs", fontsize=9)
    axes.legend(fontsize=7, loc="upper right")
    return figure
