# ruff: noqa: RUF009 (`key` returns dataclass fields)
"""The keys of `prunevit compare`."""

from dataclasses import dataclass

from prunevit.experiments.config import MeasureConfig, key

BASELINES = ("resize", "model")
POLICIES = ["evit", "topk", "random", "fixed_rate", "dpc_knn"]  # those that a keep rate makes comparable


@dataclass
class CompareConfig(MeasureConfig):
    """The keys of `prunevit compare`."""

    policies: list[str] = key(POLICIES, "files of configs/policy, or package.module:Class")
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
