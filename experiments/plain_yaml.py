"""YAML as OmegaConf reads it (1e-3 is a number, a date is text), but with 3:9 as text.

YAML 1.1 takes that for a number to the base of 60, 189; here it is a range of layers.
"""

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf

NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)",
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    ),
}
REPLACED = {*NUMBERS, "tag:yaml.org,2002:timestamp"}
Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[Resolvers] = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in REPLACED]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that stands twice."""
        names = [each.value for each, _ in node.value if isinstance(each, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"{twice} stands twice")
        return super().construct_mapping(node, deep)


for _tag, _pattern in NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), list("-+.0123456789"))


def plain(text: str) -> dict[str, Any]:
    """Parse a mapping, interpolations untouched.

    Args:
        text: YAML.

    Raises:
        yaml.YAMLError: If it is not YAML or no mapping.
        OmegaConfBaseException: If it holds what a configuration cannot, a broken interpolation for instance.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(yaml.load(text, _Loader) or {}), resolve=False)
    except RecursionError as error:
        raise yaml.YAMLError("it holds itself, or is nested too deep") from error
    if not isinstance(tree, dict):
        raise yaml.YAMLError("key: value lines are expected")
    return {str(name): value for name, value in tree.items()}
