"""YAML as this project reads it: numbers and dates as in YAML 1.2, no key twice, plain values."""

import json
import re
from typing import Any

import yaml


class NotYamlError(ValueError):
    """A text that is no YAML, or holds values that JSON could not; why, in one line."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number and 2024-01-31 as a string, as YAML 1.2 does.

    A key that appears twice is refused: of two sections of one name the first would be lost.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and the place are YAML's
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A whole one as an int: steps may be 1e4."""
        number = self.construct_yaml_float(node)
        return int(number) if number.is_integer() else number

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; one that its tag (`!!int ''`) does not fit is named by its place."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # of what YAML's constructors run into there is no end
            problem = f"{node.value!r:.80} is no value of {node.tag.rpartition(':')[2]!r}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping, whose keys must differ; what is merged into it comes later."""
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value!r} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)


def parse_yaml(text: str, *, aliases: bool = True) -> Any:
    """What a text holds, without YAML's aliases: each value is an own copy, and in no cycle.

    Args:
      text: YAML.
      aliases: whether it may have any: a few of them may stand for more than fits in memory.

    Raises:
      NotYamlError: it cannot be read, or holds what JSON has no value for.
    """
    try:
        if not aliases and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise NotYamlError("there are aliases in it; write out what they stand for")
        return json.loads(json.dumps(yaml.load(text, Loader=_Loader), default=str))
    except RecursionError:
        raise NotYamlError("nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise NotYamlError(f"{error.problem}{place}") from None
    # ValueError for a number such as 0x_, or a cycle; TypeError for an unhashable key.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise NotYamlError(" ".join(str(error).split())) from None
