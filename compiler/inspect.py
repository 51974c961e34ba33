"""`compiler inspect`: describe a plan's contents, from the plan alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console
from rich.table import Table

from outrider.plans import names
from outrider.plans.build_record import read_build_record
from outrider.plans.check import kv_bytes, kv_caches, session_bytes
from outrider.plans.kernel_costs import launch_costs
from outrider.plans.kernel_engine import KernelEngine
from outrider.plans.manifest import BackendPlan, Engine
from outrider.plans.plan import Plan, open_plan
from outrider.plans.tokenizer import TOKENIZER_FILE, Tokenizer

_PACKED = {
    **dict.fromkeys(("QuantMatMul", "QuantGather", "MatMulNBits"), (1,)),
    "GatherBlockQuantized": (0,),
    "QuantMixtureOfExperts": (2, 3, 4),
}
"""The inputs with packed weights of ops whose attribute `bits` says of which."""
_TYPES = {"float": "float32", "double": "float64"}  # as everybody calls them
_ONE = dict.fromkeys(names.SYMBOLS, 1) | {names.ROW_EDGES: 2}


def describe(path: Path) -> dict[str, Any]:
    """Return a JSON-able description: identity, geometry, programs, engines with op counts, lowering, sizes."""
    plan = open_plan(path)
    manifest, record = plan.manifest, read_build_record(plan.root)
    return {
        "name": manifest.name,
        "identity": manifest.identity,
        "format_version": manifest.format_version,
        "end_tokens": _end_tokens(plan),
        "models": {name: geometry.model_dump() for name, geometry in manifest.models.items()},
        "drafters": [d.model_dump() for d in manifest.drafters],
        "backends": {name: _backend(plan, backend) for name, backend in manifest.backends.items()},
        "tools": manifest.tools,
        "build": None if record is None else record.model_dump(),
        "bytes": sum(f.size for f in manifest.files),
        "files": [f.model_dump() for f in manifest.files],
    }


def _end_tokens(plan: Plan) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.read(plan.root / "tokenizer" / TOKENIZER_FILE)
    return [
        {"id": end, "text": tokenizer.spelled(end), "special": tokenizer.is_skipped(end)}
        for end in plan.manifest.text.eos_token_ids
    ]


def _backend(plan: Plan, backend: BackendPlan) -> dict[str, Any]:
    return {
        "programs": {
            name: [f"{stage.kind}:{stage.run}" for stage in program.stages]
            for name, program in backend.programs.items()
        },
        "symbols": backend.symbols,
        "session_bytes": session_bytes(backend),
        "kv_caches": {
            model: {"type": str(kv_caches(backend)[model].dtype), "bytes": size}
            for model, size in kv_bytes(backend).items()
        },
        "engines": {
            name: _engine(plan, engine, backend.symbols.get(name, {})) for name, engine in backend.engines.items()
        },
        "kernels": backend.kernels,
        "probe": [] if backend.probe is None else sorted(set(backend.probe.ops.values())),
        "lowering": [report.model_dump() for report in backend.lowering],
    }


def _engine(plan: Plan, engine: Engine, limits: Mapping[str, int]) -> dict[str, Any]:
    built: dict[str, Any] = {}
    if engine.builder is not None:
        built = {"builder": engine.builder, "version_compatible": engine.version_compatible}
        built |= {"devices": list(engine.devices), "gpu": engine.gpu, "front_end": engine.front_end}
    profiles = [{s: [r.least, r.most] for s, r in p.symbols.items()} for p in engine.profiles]
    return {
        "file": engine.file,
        **_content(plan.file(engine.file), engine, limits),
        **built,
        **({"holds": list(engine.holds)} if engine.holds else {}),
        **({"profiles": profiles} if profiles else {}),
    }


def _content(path: Path, engine: Engine, limits: Mapping[str, int]) -> dict[str, Any]:
    if engine.layers:
        return {"ops": engine.layers}
    return describe_kernels(path, limits) if path.suffix == ".json" else _graph(path)


def describe_kernels(path: Path, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return the launches of a step with one new token after the most keys that are ever in view, by part of the model,
    in the order in which parts begin."""
    engine = KernelEngine.model_validate_json(path.read_bytes())
    sizes = _ONE | {names.VIEW: limits[names.VIEW], names.CAPACITY: limits[names.VIEW]}
    costs, parts = launch_costs(engine, sizes), dict[str, dict[str, Any]]()
    for cost in costs:
        part = parts.setdefault(
            cost.launch.part or "other", {"kernels": [], "bytes_moved": 0, "operations": 0, "blocks": []}
        )
        part["kernels"].append(cost.launch.kernel.removeprefix("outrider_"))
        part["blocks"].append(cost.blocks)
        part["bytes_moved"] += cost.moved
        part["operations"] += cost.operations
    return {
        "ops": dict(Counter(cost.launch.kernel.removeprefix("outrider_") for cost in costs).most_common()),
        "workspace_bytes": engine.workspace_size,
        "keys_in_view": limits[names.VIEW],
        "parts": [{"part": name, **part} for name, part in parts.items()],
    }


def _graph(path: Path) -> dict[str, Any]:
    graph = onnx.load(str(path), load_external_data=False).graph
    return {"ops": op_counts(graph), "weights": weight_bytes(graph)}


def op_counts(graph: onnx.GraphProto) -> dict[str, int]:
    """Count the nodes of an engine's graph by op, most frequent first."""
    counts = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in graph.node)
    return dict(counts.most_common())


def weight_bytes(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the bytes of an engine's constants by type, most first; scales count as quantised weights."""
    packed = {
        node.input[index]: f"int{attribute.i}"
        for node in graph.node
        for index in _PACKED.get(node.op_type, ())
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    counts = Counter[str]()
    for tensor in graph.initializer:
        stored = {entry.key: entry.value for entry in tensor.external_data}
        kind = packed.get(tensor.name, onnx.TensorProto.DataType.Name(tensor.data_type).lower())
        inline = 0 if "length" in stored else len(tensor.raw_data) or onnx.numpy_helper.to_array(tensor).nbytes
        counts[_TYPES.get(kind, kind)] += int(stored.get("length", inline))
    return dict(counts.most_common())


def print_description(description: dict[str, Any], console: Console) -> None:
    model = description["models"]["target"]
    size = f"{description['bytes'] / 1e6:.1f} MB"
    console.print(f"[bold]{description['name']}[/bold]  identity {description['identity'][:16]}  {size}")
    console.print(
        f"{model['layers']} layers, hidden {model['hidden_size']}, heads {model['heads']}/{model['kv_heads']} of "
        f"{model['head_dim']}, vocabulary {model['vocab_size']}, context {model['context']}"
    )
    for window, count in Counter(filter(None, model["layer_windows"])).items():
        console.print(f"{count} of {model['layers']} layers see {window} tokens")
    ends = [f"{end['id']} {end['text']!r}{'' if end['special'] else ' (a word)'}" for end in description["end_tokens"]]
    console.print(f"ends at the tokens {', '.join(ends)}" if ends else "has no end token", markup=False)
    if (build := description["build"]) is not None:
        peak, reused = build["peak_rss_bytes"], ", ".join(build["reused"])
        memory = "" if peak is None else f", at most {peak / 1e6:.0f} MB of memory"
        taken = f"; engines taken over: {reused}" if reused else ""
        console.print(f"built in {build['seconds']:.1f} s{memory}, on {build['processor']}{taken}")
    if description["drafters"]:
        table = Table("drafter", "kind", "drafts", "acceptance", "settings", box=None, pad_edge=False)
        for drafter in description["drafters"]:
            table.add_row(drafter["name"], drafter["kind"], *_drafter_cells(drafter))
        console.print(table)
    for drafter in description["drafters"]:
        if taps := drafter.get("taps"):
            layers = ", ".join(map(str, taps["layers"]))
            console.print(
                f"{drafter['name']} reads the residual streams that enter the target's layers {layers}: "
                f"{taps['reason']}"
            )
    for name, backend in description["backends"].items():
        console.print(f"\n[bold]{name}[/bold]  {backend['session_bytes'] / 1e6:.1f} MB of buffers per session")
        kept = ", ".join(
            f"{model} {kv['bytes'] / 1e6:.2f} MB {kv['type']}" for model, kv in backend["kv_caches"].items()
        )
        console.print(f"  of which KV caches: {kept}")
        for program, stages in backend["programs"].items():
            console.print(f"  {program}: {' -> '.join(stages)}")
        for engine, facts in backend["engines"].items():
            console.print(f"  engine {engine} ({facts['file']}): {sum(facts['ops'].values())} nodes")
            if "builder" in facts:
                later = " (or loaded by a later one)" if facts["version_compatible"] else ""
                alone = f", {facts['gpu']} alone" if facts["gpu"] else ""
                console.print(f"    built by {facts['builder']}{later} for {', '.join(facts['devices'])}{alone}")
                if facts["front_end"]:
                    console.print(f"    read by {facts['front_end']}")
            if "holds" in facts:
                console.print(f"    holds {', '.join(facts['holds'])}")
            for profile in facts.get("profiles", ()):
                console.print("    profile: " + ", ".join(f"{s} {a} to {b}" for s, (a, b) in profile.items()))
            if "weights" in facts:
                stored = ", ".join(f"{size / 1e6:.2f} MB {kind}" for kind, size in facts["weights"].items())
                console.print(f"    weights: {stored}")
            console.print("    " + ", ".join(f"{op} {count}" for op, count in facts["ops"].items()))
            if "parts" in facts:
                console.print(
                    f"    workspace: {facts['workspace_bytes'] / 1e6:.2f} MB, in which a session's engines take turns"
                )
                console.print(_kernel_table(facts))
        if backend["kernels"]:
            console.print(f"  our ops compiled for {', '.join(backend['kernels'])}")
        table = Table("engine", "rule", "applied", "declined", box=None, pad_edge=False)
        for report in backend["lowering"]:
            declined = "; ".join(f"{count}x {reason}" for reason, count in report["declined"].items()) or "-"
            table.add_row(report["engine"], report["rule"], str(report["applied"]), declined)
        console.print(table)


def _kernel_table(facts: dict[str, Any]) -> Table:
    """Return the kernels of a step with one new token, by the part of the model that they compute."""
    keys, title = facts["keys_in_view"], "of one token after"
    table = Table(f"{title} {keys} keys", "kernels", "blocks", "MB moved", "Mflop", box=None, pad_edge=False)
    for part in facts["parts"]:
        kernels, blocks = (", ".join(map(str, part[name])) for name in ("kernels", "blocks"))
        table.add_row(
            part["part"], kernels, blocks, f"{part['bytes_moved'] / 1e6:.3f}", f"{part['operations'] / 1e6:.2f}"
        )
    return table


def _drafter_cells(drafter: dict[str, Any]) -> tuple[str, str, str]:
    """Return a drafter's table cells: its drafts, its acceptance, and its other settings."""
    tree = drafter.get("tree")
    if tree is None:
        said = ("name", "kind", "max_draft")
        settings = ", ".join(f"{key} {value}" for key, value in drafter.items() if value and key not in said)
        return f"trees of up to {drafter['max_draft']} nodes", "coupled", settings
    if tree["top_k"] == 1:
        return f"chains of {tree['nodes'] - 1}", drafter["acceptance"], ""
    drafts = f"trees of {tree['nodes']} nodes"
    return drafts, drafter["acceptance"], f"top_k {tree['top_k']}, depth {tree['depth']}"
