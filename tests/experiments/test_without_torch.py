"""Help and refusals that need none of the large libraries answer where there are none."""

import subprocess
import sys

from prunevit.experiments.verbs import VERBS

# What takes seconds to import is not there.
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("torch", "timm", "lightning", "torchmetrics", "matplotlib", "wandb"))
from prunevit.experiments.cli import main
print(*(main(words.split()) for words in sys.argv[1:]))
"""


def test_what_needs_no_torch_is_answered_without_it() -> None:
    answered = ["--help", "--version", *(f"{verb} --help" for verb in VERBS)]
    refused = ["nosuchverb", "report", "show none.jpg"]
    refused += [
        f"evaluate {word}" for word in ("polcy=evit", "policy=evitt", "batch_size=0", "data=imagenett")
    ]
    refused += ["finetune recipe=evitt policy=evit", "compare polices=[evit]", "plan polcy=evit", "bench x=1"]
    command = [sys.executable, "-c", WITHOUT, *answered, *refused]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.splitlines()[-1].split() == ["0"] * len(answered) + ["2"] * len(refused), done.stderr
    assert len(done.stderr.splitlines()) == len(refused)
