"""A plain dictionary to ``Settings``, or one sentence per fault: the key, what was got, what was expected."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from triaccel_bench.settings import Settings, SettingsError


def parse(config: dict) -> Settings:
    """Validate a plain configuration dictionary.

    Raises:
        SettingsError: one sentence per fault, joined by "; also ".
    """
    try:
        return Settings.model_validate_json(json.dumps(config))
    except ValidationError as error:
        raise SettingsError("; also ".join(_sentences(error))) from None


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "model_type": "a group of settings; name a file of its folder in conf/",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "of at most"),
}
_EXPECTED_TEXT = {
    "device": "cpu, cuda or cuda:N (N: the number of the card)",
    "method.name": "a label of lower-case letters, digits and _, the first a letter",
}
_PATHS = {"dataset.path", "dataset.root", "model.weights", "results.root", "results.scratch", "replay.run"}


def _sentences(error: ValidationError) -> list[str]:
    by_key: dict[str, list[str]] = {}
    for item in error.errors():
        # A union reports each of its members; the member's name is no part of the key.
        key = ".".join(str(part) for part in item["loc"] if not _is_union_tag(part))
        expectation = _expectation(item, key)
        if item["type"] in ("missing", "extra_forbidden", "json_invalid") or not expectation.startswith("expected"):
            by_key.setdefault(expectation, [])
        else:
            by_key.setdefault(f"{key}={_shown(item['input'])}", []).append(expectation.removeprefix("expected "))
    return [f"{key}: expected {' or '.join(dict.fromkeys(texts))}" if texts else key for key, texts in by_key.items()]


def _expectation(item: dict[str, Any], key: str) -> str:
    """ "expected ...", to stand behind the key and its value, or a whole sentence."""
    kind, value = item["type"], item["input"]
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        return f"{key}={_shown(value)}: unknown key; remove it or correct its name"
    if kind == "missing":
        return f"{key}: expected a value, got none; set it or use the shipped conf/ group"
    if kind == "json_invalid":
        return "expected settings in UTF-8, got bytes of another encoding; rename that file or folder"
    if kind in ("string_type", "string_pattern_mismatch"):
        if key in _PATHS and isinstance(value, (int, float)):
            return f"expected a path; write {key}=./{_shown(value)}"
        return f"expected {_EXPECTED_TEXT.get(key, 'a path' if key in _PATHS else 'text')}"
    if kind == "tuple_type":
        inside = "..." if value is None or isinstance(value, dict) else _shown(value)
        return f"expected a list; write {key}=[{inside}]"
    if kind in ("too_short", "too_long"):
        count = item["ctx"].get("min_length", item["ctx"].get("max_length"))
        return f"expected {'at least 1 value' if count == 1 else f'{count} values, one a colour channel'}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"expected a number {words} {item['ctx'][name]}"
    return f"expected {_EXPECTED[kind]}" if kind in _EXPECTED else item["msg"].replace("Input should be", "expected")


def _is_union_tag(part: object) -> bool:
    return part in ("bool", "float", "int", "str") or str(part).startswith(("literal[", "constrained-", "function-"))


def _shown(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
