"""What the authors of policies call things in the weights files that they published.

One table a method of parameter names, one of settings that their training scripts keep in the file. Everything that
is not in a table of names has timm's names in their files.
"""

import ast
import re
from collections.abc import Mapping
from typing import Any

Settings = dict[str, dict[str, Any]]

# Name of the policy -> beginning of the authors' name (a pattern) -> beginning of ours, as in `RaggedViT.state_dict()`.
NAMES: dict[str, dict[str, str]] = {
    "evit": {},  # youweiliang/evit
    "dynamicvit": {  # raoyongming/DynamicViT, and JoakimHaurum/TokenReduction
        r"score_predictor\.(\d+)\.in_conv\.": r"policies.0.predictors.\1.features.",
        r"score_predictor\.(\d+)\.out_conv\.": r"policies.0.predictors.\1.classify.",
    },
    "dpc_knn": {r"cluster_layers\.(\d+)\.score\.": r"policies.0.scorers.\1."},  # TokenReduction
    "topk": {},  # TokenReduction, as are the next two
    "ats": {},
    "kmedoids": {},
}

# How JoakimHaurum/TokenReduction names its models -> the policy, with that code's way of counting.
TOKEN_REDUCTION: dict[str, dict[str, Any]] = {
    "topk": {"name": "topk", "rounding": "floor", "of": "initial", "compound": True},
    "evit": {"name": "evit", "rounding": "floor", "of": "initial", "compound": True},
    "dyvit": {"name": "dynamicvit"},
    "ats": {"name": "ats", "variant": "token_reduction"},
    "kmedoids": {"name": "kmedoids"},
    "dpcknn": {"name": "dpc_knn"},
}


def our_names(state: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Translate the names of a state dict.

    Args:
        state: Names as the authors chose them, or any other.

    Returns:
        The same values by our names, and the policy whose names were found, if any were.
    """
    translated, found = {}, None
    for name, value in state.items():
        new, policy = _our_name(name)
        translated[new] = value
        found = policy or found
    return translated, found


def _our_name(name: str) -> tuple[str, str | None]:
    for policy, table in NAMES.items():
        for pattern, ours in table.items():
            if re.match(pattern, name):
                return re.sub(pattern, ours, name, count=1), policy
    return name, None


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Read the model and the policy off the arguments of a training script of the authors.

    Args:
        arguments: Those of youweiliang/evit or JoakimHaurum/TokenReduction; of other scripts nothing is known.

    Returns:
        The groups `model` and `policy` of a configuration, or nothing.
    """
    model = str(arguments.get("model"))
    size = re.search(r"tiny|small|base", model)
    policy = _evit(arguments) or _token_reduction(arguments)
    if size is None or policy is None:
        return {}
    kind = "_distilled" if "distilled" in model else ""
    described: dict[str, Any] = {"name": f"deit_{size[0]}{kind}_patch16_224"}
    for ours, theirs in (
        ("img_size", "input_size"),
        ("num_classes", "num_classes"),
        ("num_classes", "nb_classes"),
    ):
        if theirs in arguments:
            described[ours] = arguments[theirs]
    return {"model": described, "policy": policy}


def _evit(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    if not {"base_keep_rate", "drop_loc"} <= arguments.keys():
        return None
    return {
        "name": "evit" if arguments.get("fuse_token") else "topk",
        "keep_rate": arguments["base_keep_rate"],
        "layers": list(ast.literal_eval(str(arguments["drop_loc"]))),
    }


def _token_reduction(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    method = TOKEN_REDUCTION.get(str(arguments.get("model")).partition("_")[0])
    if method is None or not {"keep_rate", "reduction_loc"} <= arguments.keys():
        return None
    rates = list(arguments["keep_rate"])
    policy = {**method, "layers": list(arguments["reduction_loc"])}
    knob = "budget" if method["name"] == "ats" else "keep_rate"
    if len(rates) == 1:
        policy[knob] = rates[0]
    elif method["name"] == "dynamicvit":  # shares of the initial patches; ours compound
        policy[knob] = [now / before for before, now in zip([1.0, *rates], rates)]
    else:  # of most methods these are numbers of patches
        return None
    renamed = {"kmedoids": {"iterations": "cluster_iters"}, "dpc_knn": {"neighbours": "k_neighbors"}}
    for ours, theirs in renamed.get(method["name"], {}).items():
        if theirs in arguments:
            policy[ours] = arguments[theirs]
    if method["name"] == "dpc_knn":
        policy["learned_weight"] = not arguments.get("equal_weight", False)
    return policy
