"""How deep a grammar is: llguidance follows references and nesting by recursion, on the stack of the thread that asks.

Measured with llguidance 1.9: 3 KB of stack a level, so that a body of 80 KB whose rules refer to one another in a row
took the 8 MB of a thread, and ended the process. What cannot be followed exactly is counted at its worst.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from outrider.plans.errors import RequestError

MOST_LEVELS = 600
"""Of references and nesting together: 2 MB of stack."""

_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?P<comment>//[^\n]*|\#[^\n]*)|(?P<pattern>/(?:\\.|[^/\\\n])+/)"""
    r"""|(?P<json>%json\b)|(?P<name>[A-Za-z_]\w*)|(?P<line>\n)|(?P<sign>[:()\[\]{}])""",
)
_SPACE = re.compile(r"\s*")
_LARK, _ELSEWHERE = "start", "elsewhere"  # names of nodes


@dataclass
class _Node:
    """A rule or a definition: the levels of what is nested in it, and the names that it refers to."""

    levels: int = 1
    refers: list[str] = field(default_factory=list)


def check_depth(grammar: str, where: str) -> None:
    """Raise RequestError, which calls it `where`, for a grammar that is too deep to be compiled.

    `grammar` is as llguidance takes it: text for Lark, or an object that holds such texts, schemas and expressions.
    """
    try:
        levels = max(_levels(grammar, where), default=0)
    except RecursionError:
        levels = MOST_LEVELS + 1
    if levels > MOST_LEVELS:
        raise RequestError(
            f"{where} is too deep: what it refers to and what is nested in it may have more than {MOST_LEVELS} levels. "
            "Let fewer parts refer to one another in a row."
        )


def _levels(grammar: str, where: str) -> Iterator[int]:
    if not grammar.lstrip().startswith("{"):
        yield from _levels_of_lark(grammar, where)
        return
    for each in json.loads(grammar)["grammars"]:
        if "json_schema" in each:
            yield _levels_of_schema(each["json_schema"])
        if "lark_grammar" in each:
            yield from _levels_of_lark(each["lark_grammar"], where)


def _levels_of_lark(text: str, where: str) -> Iterator[int]:
    """Levels of the rules, and of every schema among them."""
    rules: dict[str, _Node] = {_LARK: _Node()}
    rule, first, open_signs, place = rules[_LARK], "", 0, 0
    while found := _TOKEN.search(text, place):
        place = found.end()
        kind, said = found.lastgroup, found[0]
        if kind == "json":
            schema, place = _schema_at(text, place, where)
            yield _levels_of_schema(schema)
        elif kind == "line":
            first = ""
        elif kind == "name":
            first = first or said
            rule.refers.append(said)
        elif said == ":" and first:  # what came since the line's beginning names a rule
            del rule.refers[len(rule.refers) - rule.refers[::-1].index(first) - 1 :]
            rule, first, open_signs = rules.setdefault(first, _Node()), "", 0
        elif kind == "sign":
            open_signs += {"(": 1, "[": 1, "{": 1, ":": 0}.get(said, -1)
            rule.levels = max(rule.levels, 1 + open_signs)
    yield _longest(rules)


def _schema_at(text: str, place: int, where: str) -> tuple[object, int]:
    """The JSON that begins after `place`, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, _SPACE.match(text, place).end())  # type: ignore[union-attr]
    except ValueError as error:
        raise RequestError(f"{where} has %json with what is no JSON: {error}. Correct it.") from None


def _levels_of_schema(schema: object) -> int:
    total, nodes, waiting = _count(schema), {}, ["#"]
    while waiting:
        name = waiting.pop()
        if name in nodes:
            continue
        nodes[name] = node = _Node(total) if name == _ELSEWHERE else _definition(_resolved(schema, name))
        node.refers = [each if _resolved(schema, each) is not None else _ELSEWHERE for each in node.refers]
        waiting += node.refers
    return _longest(nodes)


def _definition(content: object) -> _Node:
    """How deep JSON is, and what it refers to."""
    node, waiting = _Node(), [(content, 1)]
    while waiting:
        value, level = waiting.pop()
        node.levels = max(node.levels, level)
        if isinstance(value, Mapping):
            node.refers += [each for key, each in value.items() if key.endswith("Ref") or key == "$ref"
                            if isinstance(each, str)]  # fmt: skip
            waiting += [(each, level + 1) for each in value.values()]
        elif isinstance(value, list):
            waiting += [(each, level + 1) for each in value]
    return node


def _count(content: object) -> int:
    """Objects and lists in JSON."""
    found, waiting = 0, [content]
    while waiting:
        value = waiting.pop()
        inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else None
        if inner is not None:
            found += 1
            waiting += inner
    return found


def _resolved(schema: object, name: str) -> object:
    """What a reference within the schema leads to; None for any other."""
    if name != "#" and not name.startswith("#/"):
        return None
    value = schema
    for part in unquote(name[2:]).split("/") if name != "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _longest(nodes: Mapping[str, _Node]) -> int:
    """The most levels on a way along references that visits each node once, or more: nodes that lead to each other
    count as one, with the levels of all."""
    longest: dict[str, int] = {}
    for group in _groups(nodes):  # those that are referred to come first
        further = [longest[each] for name in group for each in nodes[name].refers if each in longest]
        levels = sum(nodes[name].levels for name in group) + max(further, default=0)
        longest |= dict.fromkeys(group, levels)
    return max(longest.values(), default=0)


def _groups(nodes: Mapping[str, _Node]) -> Iterator[Sequence[str]]:
    """Strongly connected components, by Tarjan's algorithm without recursion."""
    number, low, open_names, stacked = dict[str, int](), dict[str, int](), list[str](), set[str]()
    for root in nodes:
        if root in number:
            continue
        work = [(root, iter(nodes[root].refers))]
        number[root] = low[root] = len(number)
        open_names.append(root)
        stacked.add(root)
        while work:
            name, refers = work[-1]
            for each in refers:
                if each not in nodes:
                    continue
                if each not in number:
                    number[each] = low[each] = len(number)
                    open_names.append(each)
                    stacked.add(each)
                    work.append((each, iter(nodes[each].refers)))
                    break
                if each in stacked:
                    low[name] = min(low[name], number[each])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == number[name]:
                    place = open_names.index(name)
                    group = open_names[place:]
                    del open_names[place:]
                    stacked.difference_update(group)
                    yield group
