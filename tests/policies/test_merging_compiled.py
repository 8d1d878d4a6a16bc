"""Merging walks through the compiler: what inductor is given must be what every version of it can take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests_support import small_vit
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import prunevit
from prunevit.policies import LTMP, ToMe
from prunevit.policy import PruningPolicy


@pytest.mark.parametrize("make", [lambda: ToMe(5), lambda: LTMP(0.3, 0.01)], ids=["tome", "ltmp"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # what the compiler says where a walk reads counts back
def test_no_bool_is_read_as_another_dtype(make: Callable[[], PruningPolicy]) -> None:
    """Inductor of torch 2.11 asks for the range of a bool where one is viewed as int8, and there is none."""
    views, graphs = [], 0

    def record(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.view.dtype and node.args[0].meta["val"].dtype == torch.bool:
                views.append(node.format_node())
        return graph.forward

    pruned = prunevit.prune(small_vit(depth=2), make())
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    compiled = torch.compile(pruned.forward, backend=aot_autograd(fw_compiler=record))
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), pruned(images), rtol=0, atol=1e-11)
    assert graphs > 0
    assert views == []
