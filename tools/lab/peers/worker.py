"""One engine in a process of its own: `python -m outrider.tools.lab.peers.worker ENGINE`.

A line of JSON a request on stdin, a line of JSON an answer on stdout. The first request is the settings, its answer
what the engine can do. Between requests the process waits for input, and nothing of it may run: `cpu_ms`, which
counts all threads, lets the parent see that.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from time import process_time
from typing import Any, TextIO

from outrider.plans.errors import OutriderError
from outrider.tools.lab.peers.engine import GENAI, LLAMA_CPP, OPENVINO, OURS, TRANSFORMERS, Engine, Settings

_CLASSES = {
    OURS: ("outrider.tools.lab.peers.with_outrider", "Outrider"),
    TRANSFORMERS: ("outrider.tools.lab.peers.with_transformers", "Transformers"),
    GENAI: ("outrider.tools.lab.peers.with_genai", "Genai"),
    OPENVINO: ("outrider.tools.lab.peers.with_openvino", "OpenVino"),
    LLAMA_CPP: ("outrider.tools.lab.peers.with_llama_cpp", "LlamaCpp"),
}
_WARM_UP_TOKENS = 4  # the caches hold the weights of the engine that ran before


def main(name: str) -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries is no answer
        try:
            module, kind = _CLASSES[name]
            settings = Settings(**json.loads(sys.stdin.readline()))
            engine: Engine = getattr(importlib.import_module(module), kind)(settings)
        except ModuleNotFoundError as error:
            _answer(answers, {"error": f"{error.name} is not installed"})
            return
        except Exception as error:  # any: the parent lists the engine as missing, with these words
            _answer(answers, _fault(error))
            return
        _answer(answers, {"version": engine.version, "modes": engine.modes, "missing": engine.missing})
        for line in sys.stdin:
            try:
                _answer(answers, _do(engine, json.loads(line)))
            except Exception as error:
                _answer(answers, _fault(error))


def _do(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    match request.pop("do"):
        case "cpu":
            return {"cpu_ms": 1000 * process_time()}
        case "generate":
            engine.generate(**request | {"new": min(_WARM_UP_TOKENS, request["new"])})
            return asdict(engine.generate(**request))
        case "part":
            parting = engine.part(**request)  # type: ignore[attr-defined]
            return {"parting": parting and asdict(parting)}
        case other:
            raise ValueError(f"no such request: {other}")


def _fault(error: Exception) -> dict[str, str]:
    return {"error": str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"}


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
