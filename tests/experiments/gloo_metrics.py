"""Metrics of 21 images in one of several gloo processes: `python gloo_metrics.py RANK WORLD_SIZE FOLDER`."""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from prunevit.experiments.data import StridedSampler
from prunevit.experiments.metrics import Accuracy, Average, LogitDeviation, RowCounts
from prunevit.experiments.trainer import gathered


def measure(rank: int, world_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    given, base = torch.randn(2, 21, 6, generator=generator)
    targets = torch.randint(6, (21,), generator=generator)
    rows = torch.randint(1, 40, (2, 21), generator=generator)
    accuracy, deviation, counts, average = Accuracy(), LogitDeviation(), RowCounts(2, 39), Average()
    share = list(StridedSampler(range(21), rank, world_size))
    for start in range(0, len(share), 4):
        part = share[start : start + 4]
        accuracy.update(given[part], targets[part])
        deviation.update(given[part], base[part])
        counts.update(rows[:, part])
        average.update(given[part, 0])
    exact = {"accuracy": accuracy.compute(), "rows": counts.compute()}
    return {**exact, "deviation": deviation.compute(), "average": average.compute()}


if __name__ == "__main__":
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    everyone = gathered(f"process {rank}")
    print(json.dumps(measure(rank, world_size) | {"everyone": everyone}))
    dist.destroy_process_group()
