"""The sandbox in which a chat template runs: Jinja's own, where a rendering has a budget (`template_budget.py`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import DictLoader, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

from outrider.plans.template_budget import (
    ELEMENT,
    MAKING,
    MOST_BITS,
    PLAIN,
    SIZED,
    begin_budget,
    charge,
    charge_comparison,
    charge_made,
    charge_printed,
    charge_search,
    charge_step,
    charge_walk,
    check_format,
    check_made,
    check_numbers,
    check_size,
    product_size,
)


class _CodeGenerator(CodeGenerator):
    """Leaves constants of a template to its rendering: otherwise loading a plan would compute them. Operators that
    Jinja writes as Python's, and that may take long, go through the sandbox."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:  # noqa: N802
        first = node.ops[0]
        if len(node.ops) == 1 and (_is_short(first.expr) or (_is_short(node.expr) and "in" not in first.op)):
            super().visit_Compare(node, frame)
            return
        self.write("environment.compared(")
        self.visit(node.expr, frame)
        for each in node.ops:
            self.write(f", {each.op!r}, ")
            self.visit(each.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.sliced(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(nodes.Getitem(node.node, _key(node.arg), node.ctx), frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        super().visit_Dict(nodes.Dict([nodes.Pair(_key(each.key), each.value) for each in node.items]), frame)


def _is_short(node: nodes.Expr) -> bool:
    """Whether it is a constant with which any value is compared at once, or a list of some."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return len(node.items) <= 64 and all(map(_is_short, node.items))
    return isinstance(node, nodes.Const) and not (isinstance(node.value, str) and len(node.value) > 64)


def _key(node: nodes.Expr) -> nodes.Expr:
    """The key of a mapping, whose hash is to be found."""
    if isinstance(node, nodes.Const):
        return node
    return nodes.Call(nodes.EnvironmentAttribute("hashed"), [node], [], None, None)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a limit to what a template does: turns of loops, calls, sizes of what it makes, and the sum
    of all that it makes, walks through and compares.

    A rendering of a real conversation is far below them. Sizes are known before anything is made: of products and sums
    of texts and lists, and of the methods and filters by which a small text becomes a large one.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, extensions: Sequence[type[Extension]], filters: Mapping[str, Callable[..., Any]]) -> None:
        """`filters` stand in for Jinja's of the same names, and are bounded as these are."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            loader=DictLoader({}),
            optimized=False,
            finalize=charge_printed,
        )
        self.filters = {
            name: each if name in _QUICK_FILTERS else self.guarded(name, each)
            for name, each in {**self.filters, **filters}.items()
            if name not in _OF_PAGES
        }
        self.tests = {
            name: each if name in _QUICK_TESTS else self.comparing(name, each)  # type: ignore[arg-type]
            for name, each in self.tests.items()
        }
        del self.globals["lipsum"]  # texts of any length, for tests of pages
        self.globals |= {"namespace": _PublicNamespace, "dict": _new_dict}

    @staticmethod
    def begin() -> None:
        """Give the rendering that this thread begins all that one may do."""
        begin_budget()

    def count_step(self) -> str:
        """Called at every turn of a loop, and at every call."""
        charge_step()
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        counted = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
        for body in [getattr(each, "body") for each in parsed.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:  # noqa: B009
            body.insert(0, nodes.ExprStmt(counted, lineno=body[0].lineno if body else 1))
        for loop in parsed.find_all(nodes.For):
            loop.test = loop.test and nodes.Or(counted, loop.test)
        for concat in list(parsed.find_all(nodes.Concat)):  # which is no operator to Jinja
            texts = concat.nodes
            concat.nodes = [nodes.Call(nodes.EnvironmentAttribute("joined"), texts, [], None, None)]
        return parsed.set_environment(self)  # type: ignore[return-value]

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a block: of a macro, of `set` or of `filter`."""
        texts = list(pieces)
        charge(sum(map(len, texts)))
        return "".join(texts)

    def joined(self, *values: object) -> str:
        texts = [str(charge_printed(value)) for value in values]
        check_size(sum(map(len, texts)))
        return "".join(texts)

    def compared(self, left: Any, *rest: Any) -> Any:
        """`left < right`, and so on for each operator and operand of `rest`, all of which are computed."""
        found: Any = True
        for sign, right in zip(rest[::2], rest[1::2], strict=True):
            if right.__class__ is not dict or left.__class__ is not str:  # whose hash is known, or found once
                charge_comparison(sign, left, right)
            found = _COMPARISONS[sign](left, right)
            if not found:
                break
            left = right
        return found

    def hashed(self, key: Any) -> Any:
        charge_walk(key)
        return key

    def sliced(self, made: Any) -> Any:
        if isinstance(made, SIZED):
            charge(len(made) * (1 if isinstance(made, str) else 8))
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            check_size(size := len(left) + len(right))
            charge(size)
            return left + right
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_size(left.bit_length() * right if abs(left) > 1 else 0, MOST_BITS)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            check_size(left.bit_length() + right.bit_length(), MOST_BITS)
        elif operator == "*":
            check_size(product_size(left, right))
        elif operator == "+" and isinstance(left, SIZED) and isinstance(right, SIZED):
            check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            check_format(left, charge_printed(right))
        return self.sliced(super().call_binop(context, operator, left, right))

    def call(self, context: Any, called: Any, /, *args: Any, **options: Any) -> Any:
        owner = getattr(called, "__self__", None)
        if owner is self:  # a call that `_parse` has put there
            return called(*args)
        self.count_step()
        if isinstance(called, Macro):
            return super().call(context, called, *args, **options)
        name = getattr(called, "__name__", "")
        charge(ELEMENT * (len(args) + len(options)))
        for each in (*args, *options.values()) if options else args:
            if type(each) is not str:
                charge_walk(each)
        if isinstance(owner, str):
            if name == "translate":
                raise SecurityError("texts have no `translate` here")
            charge_search(name, owner, next((each for each in args if isinstance(each, str)), ""))
            if args or options:
                check_made(name, owner, args, options)
        else:
            check_numbers(args, options)
            if isinstance(owner, list | tuple) or name == "copy":
                charge_walk(owner)
        made = super().call(context, called, *args, **options)
        return made if isinstance(made, str) and not isinstance(owner, str) else charge_made(made, owner)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's own `format`, with a limit on what it makes."""
        if type(value) in PLAIN or super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        kind: Any = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        def checked(*args: Any, **options: Any) -> str:
            given = ((), *args) if value.__name__ == "format_map" else (args, options)
            return str(kind.vformat(text, *given)) if type(text) is str else Markup(kind.vformat(text, *given))

        return checked

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that makes nothing too large."""
        first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0
        weight, lazy = _WEIGHTS.get(name, 32), name in _LAZY

        @wraps(function)
        def guard(*args: Any, **options: Any) -> Any:
            self.count_step()
            value, rest = args[first], args[first + 1 :]
            if lazy:
                charge(ELEMENT * len(value) if hasattr(value, "__len__") else 0)
            else:
                if type(value) not in PLAIN and isinstance(value, Iterator):
                    value = list(value)
                    args = (*args[:first], value, *rest)
                charge_walk(value, weight)
            for each in (*rest, *options.values()) if rest or options else ():
                if type(each) is not str:
                    charge_walk(each)
            if name in MAKING or rest or options:
                check_made(name, value, rest, options)
            return charge_made(function(*args, **options), value)

        return guard

    def comparing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A test that compares no more than it may."""
        first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @wraps(function)
        def guard(*args: Any) -> Any:
            charge_comparison(name, args[first], args[first + 1] if len(args) > first + 1 else None)
            return function(*args)

        return guard


class _Formatter(SandboxedFormatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        charge(ELEMENT)
        return super().convert_field(charge_printed(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_format(format_spec, ())
        made = super().format_field(value, format_spec)
        check_size(len(made))
        return made


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_QUICK_FILTERS = {"attr", "count", "d", "default", "first", "last", "length"}
"""They look at a value, and neither walk through it nor make another."""
_QUICK_TESTS = {
    *("boolean", "callable", "defined", "even", "false", "float", "integer", "iterable", "mapping", "none", "number"),
    *("odd", "sameas", "sequence", "string", "true", "undefined"),
}
_LAZY = {"batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
"""Filters that take elements one at a time, and look into none."""
_WEIGHTS = dict.fromkeys(
    ("escape", "e", "forceescape", "join", "lower", "replace", "safe", "string", "trim", "upper"), 1
)
"""What a character counts in a filter; in others 32, as they take about so much longer."""
_WEIGHTS |= {"wordwrap": 128, "indent": 8, "tojson": 8}
_OF_PAGES = {"striptags", "urlize", "xmlattr"}
"""Filters for pages, which take a time that grows with the square of a text."""


class _PublicNamespace(Namespace):
    """Jinja's `namespace` without underscore names, through which a template could pose as another object."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named `self`, as in Jinja: `namespace(self=1)` is allowed.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _NewDict:
    """`dict`, of which a template has no more than this."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


_new_dict = _NewDict()


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold the name {name!r}")
