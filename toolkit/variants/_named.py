"""From a name such as `mesh(beta=0.95)+sign_only` to a recipe.

Grammar: NAME[(switch=value, ..)] (+ VARIANT[(value, .. or switch=value, ..)])*. A value is a number, True, False,
None, a quoted string, a bare word, or a tuple of these. Nothing is ever evaluated.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

from toolkit.recipes import RECIPES, Recipe
from traces.errors import GradreelError

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<string>'[^']*'|\"[^\"]*\")"
    r"|(?P<mark>[(),=+]))"
)
_LONGEST = 2000  # characters of a recipe name
_WORDS = {"True": True, "False": False, "None": None}


def recipe(name: str | Recipe, **options: Any) -> Recipe:
    """The recipe called `name`, with switches changed by `options`, then passed through its variants in order.

    `recipe("mesh+sign_only", beta=0.95)`; a Recipe is returned as it is. The result's name records every switch that
    was given, and is itself a name this function accepts. Errors: GradreelError for a malformed name, an unknown
    recipe, variant or switch, a value out of range, a variant that finds nothing to change.
    """
    if isinstance(name, Recipe):
        if options:
            raise GradreelError(
                f"recipe {name.name} is built already; give {', '.join(sorted(options))} when building it"
            )
        return name
    if not isinstance(name, str):
        raise GradreelError(f"a recipe is a name or a Recipe, not {type(name).__name__}")
    from toolkit.variants import VARIANTS

    (base, arguments, switches), *variants = _Parser(name).parse()
    if arguments:
        raise GradreelError(f"recipe name {name!r}: {base} takes switch=value, not {arguments[0]!r}")
    switches = {**switches, **options}
    built = RECIPES.get(base)(**switches)
    label = base + _label((), switches)
    built = replace(built, name=label, options=switches)
    for variant_name, values, named in variants:
        variant = VARIANTS.get(variant_name)
        try:
            inspect.signature(variant.change).bind(built, *values, **named)
        except TypeError:
            raise GradreelError(
                f"variant {variant_name}: wrong arguments in {name!r}; usage: {variant.usage}"
            ) from None
        label += f"+{variant_name}{_label(values, named)}"
        built = replace(variant.change(built, *values, **named), name=label)
    return built


def _label(values: tuple[Any, ...], named: dict[str, Any]) -> str:
    parts = [_text(v) for v in values] + [f"{k}={_text(v)}" for k, v in named.items()]
    return f"({', '.join(parts)})" if parts else ""


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_text(v) for v in value)}{',' if len(value) == 1 else ''})"
    return value if isinstance(value, str) and value.isidentifier() and value not in _WORDS else repr(value)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.tokens, at = text, list[tuple[str, str]](), 0
        if len(text) > _LONGEST:
            raise GradreelError(f"recipe name {text[:40]!r}... has {len(text)} characters, at most {_LONGEST} are read")
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            # A sign can only start a number inside parentheses; elsewhere + joins variants.
            if match and match.lastgroup == "number" and match[0].strip()[0] == "+" and not self._inside():
                match = re.compile(r"\s*(?P<mark>\+)").match(text, at)
            if match is None or match.lastgroup is None:
                raise self._error(f"unexpected {text[at:].strip()[:1]!r}")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.position = 0

    def parse(self) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        calls = [self._call()]
        while self._take("mark", "+"):
            calls.append(self._call())
        if self.position < len(self.tokens):
            raise self._error(f"unexpected {self.tokens[self.position][1]!r}")
        return calls

    def _inside(self) -> bool:
        marks = [value for kind, value in self.tokens if kind == "mark"]
        return marks.count("(") > marks.count(")")

    def _call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        name, values, named = self._word(), list[Any](), dict[str, Any]()
        if self._take("mark", "("):
            while not self._take("mark", ")"):
                self._argument(values, named)
                if not self._take("mark", ",") and self._peek() != ("mark", ")"):
                    raise self._error("a closing ) is missing")
        return name, tuple(values), named

    def _argument(self, values: list[Any], named: dict[str, Any]) -> None:
        following = self.tokens[self.position + 1 : self.position + 2]
        if self._peek()[0] == "word" and following == [("mark", "=")]:
            key = self._word()
            self.position += 1
            if key in named:
                raise self._error(f"{key} is given twice")
            named[key] = self._value()
        elif named:
            raise self._error("a plain value follows a named one")
        else:
            values.append(self._value())

    def _value(self) -> Any:
        kind, value = self._peek()
        self.position += 1
        if kind == "number":
            if len(value) > 40:
                raise self._error(f"the number {value[:12]}... is too long")
            return int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)
        if kind == "string":
            return value[1:-1]
        if kind == "word":
            return _WORDS.get(value, value)
        if (kind, value) == ("mark", "("):
            items = []
            while not self._take("mark", ")"):
                items.append(self._value())
                if not self._take("mark", ",") and self._peek() != ("mark", ")"):
                    raise self._error("a closing ) is missing")
            return tuple(items)
        raise self._error("a value is missing" if kind == "end" else f"unexpected {value!r}")

    def _word(self) -> str:
        kind, value = self._peek()
        if kind != "word":
            raise self._error("a name is missing" if kind == "end" else f"unexpected {value!r}")
        self.position += 1
        return value

    def _take(self, kind: str, value: str) -> bool:
        found = self._peek() == (kind, value)
        self.position += found
        return found

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")

    def _error(self, what: str) -> GradreelError:
        return GradreelError(
            f"recipe name {self.text!r}: {what}; write NAME+VARIANT(value), for instance mesh+sign_only "
            "or sinkgd+smaller_steps(0.3)"
        )
