"""Parses YAML to the types of JSON, with numbers and dates as in YAML 1.2.

A duplicate key is an error.
"""

import json
import re
from typing import Any

import yaml


class NotYamlError(ValueError):
    """The error for a text that is not YAML, or holds values that JSON cannot hold.

    The message is one line.
    """


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads 3e-4 as a number and 2024-01-31 as a string, as in YAML 1.2.

    Duplicate keys are errors, because the first of two sections with the same name would be lost.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML requires this class attribute
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return an int for a whole number, so that `steps: 1e4` works."""
        number = self.construct_yaml_float(node)
        return int(number) if number.is_integer() else number

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; errors such as `!!int ''` name the line and column."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # PyYAML's constructors may raise anything
            problem = f"{node.value!r:.80} is not a valid {node.tag.rpartition(':')[2]!r}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose the next mapping, whose keys must differ; merge keys are resolved later."""
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
    """The value of a YAML text, in the types of JSON.

    Aliases are replaced by copies, so the value has no cycles.

    Args:
      text: the YAML text.
      aliases: whether aliases are allowed; a few of them can expand to more than memory holds.

    Raises:
      NotYamlError: the text cannot be read, or holds values that JSON cannot hold.
    """
    try:
        if not aliases and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise NotYamlError("aliases are not allowed here; write out their values")
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
