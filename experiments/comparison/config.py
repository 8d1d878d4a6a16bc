# ruff: noqa: RUF009 (`key` and `group` return dataclass fields)
"""The keys of `prunevit compare`, `report` and `show`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunevit.experiments.comparison.series import DEVIATIONS, METRICS
from prunevit.experiments.compose import group_names, nearest
from prunevit.experiments.config import MeasureConfig, ModelConfig, VerbConfig, group, key

BASELINES = ("resize", "model")
POLICIES = ["evit", "topk", "random", "fixed_rate", "dpc_knn"]  # those that a keep rate makes comparable


@dataclass
class CompareConfig(MeasureConfig):
    """The keys of `prunevit compare`."""

    policies: list[str] = key(POLICIES, "files of configs/policy, package.module:Class or file.py:Class")
    keep_rates: list[float] | None = key(
        None, "rates of each policy; null: 0.7, 0.5, 0.3, unless gmacs is given", low=0
    )
    gmacs: list[float] | None = key(None, "equal cost: GMACs an image that each policy is set to", low=0)
    seeds: list[int] | None = key(None, "seeds of the policies that draw; null: seed", low=0, high=2**32 - 1)
    rows: str | None = key(None, "YAML file of rows: policy, weights, seed; in place of policies")
    baselines: list[str] = key(
        [], "the unpruned model made smaller: by its input, or a smaller one", choices=BASELINES
    )
    numeric_images: int = key(
        4, "photos of each row on which the backend is compared with the reference; 0: none", low=0
    )
    timing_s: float = key(
        6.0, "seconds for each of throughput and latency, of all rows in turn; 0: not measured", low=0
    )
    pictures: int = key(4, "photos that are drawn with what each row keeps of them; 0: none", low=0)

    def problems(self) -> list[str]:
        """Say what contradicts itself, a line each."""
        lines = super().problems()
        known = group_names("policy")
        lines += [
            f"policies: unknown name, got {each}; {nearest(each, known)}"
            for each in self.policies
            if each not in known and ":" not in each
        ]
        for name in ("policies", "keep_rates", "gmacs", "seeds", "baselines"):
            values = getattr(self, name) or []
            if getattr(self, name) == [] and name not in ("policies", "baselines"):
                lines.append(f"{name}: must hold a value, got none; write {name}=null for none")
            lines += [
                f"{name}: {each} is listed twice"
                for each in sorted({v for v in values if values.count(v) > 1})
            ]
        if self.keep_rates is not None and self.gmacs is not None:
            lines.append("gmacs: sets the knob of each policy itself; give keep_rates or gmacs")
        if self.rows is not None and self.gmacs is not None:
            lines.append("gmacs: belongs to policies; in a file of rows write it into the policy of each row")
        if self.rows is not None and self.keep_rates is not None:
            lines.append(
                "keep_rates: belongs to policies; in a file of rows write it into the policy of each row"
            )
        if self.rows is not None and self.seeds is not None:
            lines.append("seeds: belongs to policies; in a file of rows write seed into each row")
        if self.rows is None and not self.policies:
            lines.append("policies: must name at least one policy, got none; or give rows=FILE")
        return lines


@dataclass
class ReportConfig(VerbConfig):
    """The keys of `prunevit report`."""

    runs: list[str] = key([], "folders that evaluate or compare wrote")
    output: str | None = key(
        None, "the HTML file, replaced if it is there; null: report.html in the folder, of several: here"
    )
    metric: str = key("top1", "what the accuracy charts show", choices=tuple(METRICS))
    deviation: str = key("logit_kl", "what the chart of logits shows", choices=tuple(DEVIATIONS))

    def problems(self) -> list[str]:
        """Say what is wrong with the paths, a line each."""
        lines = []
        if not self.runs:
            lines.append("runs: must name at least one folder of results, got none")
        if self.output is not None and Path(self.output).suffix != ".html":
            lines.append(f"output: must end in .html, got {self.output}")
        return lines

    @property
    def page(self) -> Path:
        """The HTML file."""
        return Path(self.output or (Path(self.runs[0]) if len(self.runs) == 1 else Path()) / "report.html")


@dataclass
class ShowConfig(VerbConfig):
    """The keys of `prunevit show`."""

    image: str = key("", "the photo; the folder that it stands in is its label if the model has such a class")
    output: str = key("kept.png", "the PNG file to write; one that is there is replaced")
    model: ModelConfig = group(ModelConfig, "a file of configs/model, or a timm architecture")
    policy: dict[str, Any] = group(dict, "a file of configs/policy, package.module:Class or file.py:Class")
    weights: str | None = key(
        None, "weights file of the model: safetensors, or a torch pickle of tensors only"
    )
    seed: int = key(0, "seed of a policy that draws", low=0, high=2**32 - 1)

    def problems(self) -> list[str]:
        """Say what is wrong with the files and the model, a line each."""
        lines = self.model.problems()
        if not os.path.exists(self.image):
            got = f"{self.image}, which does not exist" if self.image else "none"
            lines.append(f"image: must be a photo, got {got}")
        elif not os.path.isfile(self.image):
            lines.append(f"image: must be a photo, got {self.image}, which is no file")
        elif os.path.exists(self.output) and os.path.samefile(self.image, self.output):
            lines.append(f"output: must be another file than the photo, got {self.output}")
        if Path(self.output).suffix.lower() != ".png":
            lines.append(f"output: must end in .png, got {self.output}")
        return lines
