"""Options of Python's calls: each is offered to C, or left out with a reason."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import RequestError
from outrider.runtime.embed.handles import InvalidArgumentError
from outrider.runtime.embed.options import OF_MESSAGES, OF_SUBMIT, OFFERED, OPEN_OPTIONS, describe_options, open_options

HEADER = (Path(__file__).parents[3] / "runtime" / "embed" / "outrider.h").read_text(encoding="utf-8")


def keywords(call: object) -> set[str]:
    """Arguments of a method of Python's, without `self`."""
    assert callable(call)
    return {
        each.name
        for each in inspect.signature(call).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    }


def test_every_argument_is_offered() -> None:
    assert [name for name, call in OFFERED.items() if call is None] == []
    assert keywords(Runtime.submit) == {"prompt", "messages", *OF_SUBMIT, *OF_MESSAGES}
    assert keywords(Runtime.load) | {"prefix_cache_tokens"} == {"plan", *OPEN_OPTIONS}


def test_the_header_says_what_each_option_is() -> None:
    assert describe_options() in HEADER
    for key in (*OPEN_OPTIONS, *(each.name for kind in (PrefixCacheConfig, SchedulerConfig) for each in fields(kind))):
        assert f'"{key}"' in HEADER, key


def test_the_defaults_that_the_header_tells_are_those() -> None:
    for kind in (PrefixCacheConfig, SchedulerConfig):
        for each in fields(kind):
            told = re.search(rf'"{each.name}" \(([\w.*]+)', HEADER.replace("\n * ", " "))
            if told and told[1] not in ("at", "of"):
                assert eval(told[1], {"true": True}) == each.default, each.name  # a number, a product, or a truth


def test_settings_of_cache_and_scheduler_are_pythons() -> None:
    given = open_options(
        '{"scheduler": {"max_running": 2, "overlap": false}, "prefix_cache": {"memory_bytes": 1000000}}'
    )
    assert given["scheduler"] == SchedulerConfig(max_running=2, overlap=False)
    assert given["prefix_cache"] == PrefixCacheConfig(memory_bytes=10**6)
    assert open_options('{"prefix_cache_tokens": 7}') == {"prefix_cache": PrefixCacheConfig(max_cached_tokens=7)}
    assert open_options('{"prefix_cache_tokens": 0}') == {}


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ('{"scheduler": 3}', InvalidArgumentError, "'scheduler' is a JSON object, not 3"),
        ('{"scheduler": {"running": 3}}', InvalidArgumentError, "no option 'running'; the options are max_running"),
        ('{"scheduler": {"max_running": "x"}}', RequestError, "max_running is 'x'"),
        ('{"scheduler": {"overlap": 1}}', InvalidArgumentError, "'scheduler.overlap' is a truth value, not 1"),
        ('{"prefix_cache": {"eviction_target": 2}}', RequestError, "eviction_target is 2"),
        ('{"prefix_cache": {"memory_bytes": true}}', InvalidArgumentError, "is a whole number, not true"),
        ('{"prefix_cache": {}, "prefix_cache_tokens": 9}', InvalidArgumentError, "pass one of them"),
    ],
)
def test_wrong_settings_are_named(given: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        open_options(given)
