"""Make tool_calls.json: the tool calls that the parsers of vLLM and SGLang find in answers.

    ENV/bin/python tools/goldens/tool_calls.py VLLM SGLANG

The arguments are folders with the unpacked wheels of vLLM 0.33.0 and SGLang 0.5.23. Only their
parsers are loaded. ENV has partial-json-parser, orjson, regex, openai and pydantic. vLLM's parser
for Mistral's calls needs the rest of vLLM, so only SGLang's parser reads these calls.
"""

import importlib.machinery
import importlib.util
import itertools
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "tool_calls.json"
NAMES = ("get_weather", "add", "search-web", "write_file", "now")


class Record(SimpleNamespace):
    """A stand-in for every class of vLLM and SGLang that the parsers use."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class Stubs:
    """An import hook that makes stubs for modules of vLLM and SGLang.

    In a stub, a capitalised name is a subclass of `Record`; any other name is a function that
    returns None, with a few exceptions.
    """

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] in ("vllm", "sglang"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: self._attribute(name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []

    @staticmethod
    def _attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "init_logger":
            return lambda *_: SimpleNamespace(exception=print, warning=print, debug=lambda *_: None)
        if name == "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS":
            return 5
        if name == "envs":
            return SimpleNamespace(SGLANG_FORWARD_UNKNOWN_TOOLS=SimpleNamespace(get=lambda: False))
        return type(name, (Record,), {}) if name[0].isupper() else lambda *_, **__: None


def load(folder: str, name: str) -> types.ModuleType:
    """Load one module of a wheel without its parent packages."""
    path = Path(folder, *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def answers(style: str) -> list[str]:
    """Return fifty answers that a target with this style of tool calls might give."""
    given: list[tuple[str, dict[str, Any]]] = [
        ("get_weather", {"city": "Lisbon"}),
        ("get_weather", {"city": "São Paulo", "unit": "celsius"}),
        ("get_weather", {"city": "北京", "days": 3, "hourly": True}),
        ("add", {"a": 3.5, "b": -4}),
        ("add", {"a": 1e-07, "b": 12345678901234567890}),
        ("search-web", {"query": 'who said "to be; or not"?', "sites": ["a.org", "b.org"]}),
        ("search-web", {"query": "{braces} [brackets] </tool_call", "limit": None}),
        ("search-web", {"filters": {"after": {"year": 2020}, "tags": [{"k": 1}, []]}}),
        ("write_file", {"path": "C:\\tmp\\a.txt", "text": 'one\n\ttwo\n\\"three\\"'}),
        ("write_file", {"path": "é.json", "text": '{"name": "add", "arguments": {}}'}),
        ("write_file", {"text": "\U0001f600 \u2028 \x7f", "mode": ""}),
        ("now", {}),
    ]
    one = [wrapped(style, [call]) for call in given]
    texts = list(one)
    # JSON with less or more whitespace.
    texts += [wrapped(style, [call], separators=(",", ":")) for call in given[:8]]
    texts += [wrapped(style, [call], ensure_ascii=True) for call in given[1:3]]
    texts += [wrapped(style, [given[i], given[j]]) for i, j in itertools.combinations(range(5), 2)]
    texts += [wrapped(style, given[:4]), wrapped(style, [given[3]] * 2)]
    if style != "llama3":  # calls of this style only come first
        texts += [f"Let me see.\n{text}" for text in one[:4]]
    texts += [
        "No tool is needed: it is 4 o'clock.",
        "",
        " \n",
        "Braces {like these} are no call.",
        wrapped(style, [("unknown", {"a": 1})]),
        # Cut off, and broken.
        one[0][: one[0].index("Lis")],
        one[3][: one[3].index("3.5")],
        one[0].replace('"city": ', "city: "),
        one[3].replace("-4}", "-4"),
        {
            "hermes": "<tool_call>\nget_weather(city='Lisbon')\n</tool_call>",
            "llama3": '<|python_tag|>get_weather.call(city="Lisbon")',
            "mistral": "[TOOL_CALLS]",
        }[style],
    ]
    texts += {
        "hermes": [one[0].replace("\n", ""), one[3].replace("\n", "\n\n"), one[11].strip() + "\n"],
        "llama3": [
            *(f"<|python_tag|>{text}" for text in one[:5]),
            one[0].replace("parameters", "arguments"),
        ],
        "mistral": [f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in given[:2]]
        + [f"[TOOL_CALLS]{name}{json.dumps(given)}" for name, given in given[:1]],
    }[style]
    return texts[:50]


def wrapped(style: str, calls: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write calls as a target of this style does."""
    key = "parameters" if style == "llama3" else "arguments"
    written = [
        json.dumps({"name": name, key: given}, ensure_ascii=ensure_ascii, **options)
        for name, given in calls
    ]
    match style:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)
        case "llama3":
            return "; ".join(written)
    return f"[TOOL_CALLS] [{', '.join(written)}]"


def parsers(vllm: str, sglang: str) -> dict[str, list[tuple[str, Any]]]:
    """Return, by style, the names of the parsers and functions that parse an answer's calls."""
    base = "sglang.srt.function_call."
    for name in ("utils", "core_types", "base_format_detector"):
        load(sglang, base + name)
    offered = [SimpleNamespace(function=SimpleNamespace(name=name)) for name in NAMES]

    def of_sglang(module: str, name: str) -> Any:
        kind = getattr(load(sglang, base + module), name)

        def parse(text: str) -> list[Any]:
            detector = kind()
            if not detector.has_tool_call(text):
                return []
            try:
                return [
                    [call.name, json.loads(call.parameters)]
                    for call in detector.detect_and_parse(text, offered).calls
                ]
            except Exception as error:  # which its server answers with the text
                print("SGLang:", error)
                return []

        return parse

    tokenizer = SimpleNamespace(
        encode=lambda text, **_: [0], decode=lambda ids: "", get_vocab=lambda: {"<|python_tag|>": 0}
    )
    for name in ("tool_strict_level", "utils", "abstract_tool_parser"):
        load(vllm, f"vllm.tool_parsers.{name}")

    def of_vllm(module: str, name: str) -> Any:
        kind = getattr(load(vllm, f"vllm.tool_parsers.{module}"), name)

        def parse(text: str) -> list[Any]:
            told = kind(tokenizer).extract_tool_calls(text, None).tool_calls
            calls = [[one.function.name, json.loads(one.function.arguments)] for one in told]
            # This parser also reads calls of tools that were not offered.
            return [call for call in calls if call[0] in NAMES]

        return parse

    return {
        "hermes": [
            ("vllm", of_vllm("hermes_tool_parser", "Hermes2ProToolParser")),
            ("sglang", of_sglang("qwen25_detector", "Qwen25Detector")),
        ],
        "llama3": [
            ("vllm", of_vllm("llama_tool_parser", "Llama3JsonToolParser")),
            ("sglang", of_sglang("llama32_detector", "Llama32Detector")),
        ],
        "mistral": [("sglang", of_sglang("mistral_detector", "MistralDetector"))],
    }


def main() -> None:
    """Write the golden; if the two parsers differ on an answer, write the calls of both."""
    sys.meta_path.append(Stubs())
    golden: dict[str, Any] = {"names": NAMES, "styles": {}}
    for style, own in parsers(*sys.argv[1:]).items():
        cases = []
        for text in answers(style):
            read = {name: parse(text) for name, parse in own}
            same = len({json.dumps(calls) for calls in read.values()}) == 1
            cases.append({"text": text, "calls": next(iter(read.values())) if same else read})
        golden["styles"][style] = cases
    lines = [
        json.dumps(style) + ": [\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]"
        for style, cases in golden["styles"].items()
    ]
    head = json.dumps(golden["names"])
    GOLDEN.write_text(f'{{"names": {head},\n"styles": {{\n{",".join(lines)}\n}}}}\n')


if __name__ == "__main__":
    main()
