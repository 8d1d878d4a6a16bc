"""Two runs, one after the other, in the processes that torchrun starts: `finetuning_processes.py PHOTOS OUTPUT`."""

import sys
from pathlib import Path

from finetuning_runs import finetune
from torch import distributed

STEADY = ["max_steps=6", "ema_decay=0.5", "weight_decay=0.1"]
LEARNABLE = ["policy=dynamicvit", "max_steps=3", "checkpoint_every_n_steps=2", "distillation_weight=1"]

if __name__ == "__main__":
    root, output = map(Path, sys.argv[1:])
    code = finetune(root, output / "two", *STEADY) or finetune(root, output / "learnable", *LEARNABLE)
    distributed.destroy_process_group()
    sys.exit(code)
