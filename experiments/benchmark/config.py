# ruff: noqa: RUF009 (`key` returns a dataclass field)
"""The keys of `prunevit bench`."""

from dataclasses import dataclass

from omegaconf import MISSING

from prunevit.experiments.config import MODES, OutputConfig, key


@dataclass
class BenchConfig(OutputConfig):
    """The keys of `prunevit bench`."""

    suite: str = key(MISSING, "what is measured", choices=("attention", "model", "stages", "policies"))
    rows: str = key(
        "must_reach",
        "the rows with a target, or a sweep over the keys below",
        choices=("must_reach", "sweep"),
    )
    models: list[str] = key([], "timm architectures or sample; empty: those of the rows")
    img_sizes: list[int] = key([], "input sizes, px; empty: the models' own", low=1)
    batch_sizes: list[int] = key([], "images a batch; empty: those of the rows", low=1)
    dtypes: list[str] = key(["bf16"], "number formats", choices=("bf16", "fp16", "fp32"))
    policies: list[str] = key(["evit"], "sweep: files of configs/policy", choices=())
    ratios: list[float] = key([0.3, 0.5, 0.7], "sweep: shares of the tokens that are pruned", low=0)
    modes: list[str] = key(
        ["eager", "graph", "compile+graph"], "how the models are executed", choices=MODES[:-1]
    )
    seconds: float = key(0.3, "seconds for each measurement", low=0)

    def problems(self) -> list[str]:
        """Say what contradicts itself, a line each."""
        return [f"ratios: must be below 1, got {each}" for each in self.ratios if each >= 1]
