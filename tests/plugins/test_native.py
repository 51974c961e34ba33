"""Binding: what is checked, how it is said, and that calls allocate nothing."""

import re
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from outrider import plugins
from outrider.plans.sampling import Sampling
from outrider.plugins import native, onnxruntime_ops
from outrider.plugins.ops import OPS
from outrider.plugins.schema import ANY_KV

CAPACITIES = {"N": 6, "T": 40, "M": 5, "V": 11, "B": 2, "trees": 3, "capacity": 32, "planes": 2, "heads": 2}
CAPACITIES |= {"head_dim": 4, "slot_size": 4, "R": 3, "E": 4, "S": 6}
CAPACITIES |= {"depths": 5}
CAPACITIES |= {"layers": 1, "blocks": 9, "retrieval": 3, "partial_capacity": 20, "num_heads * head_dim": 16}
LAYOUT = {"block_size": 2, "sink_blocks": 1, "window_blocks": 1}
ATTRIBUTES = dict.fromkeys(("BlockSummary", "BlockSelect", "PartialKvGather"), LAYOUT)
GRAPH_OPS = (
    *(
        "BranchAttention",
        "DraftSample",
        "MixtureOfExperts",
        "PathConv",
        "Route",
        "StateScan",
        "TreeExpand",
        "TreeRerank",
        "WindowBias",
    ),
)
KERNELS = [name for name in OPS if name not in GRAPH_OPS]
BOUND_TENSORS = [(name, spec.name) for name in KERNELS for spec in OPS[name].schema.tensors]


def shape_of(spec):
    return tuple(CAPACITIES[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def arrays_of(op_name):
    """Arrays of the schema's dtypes and shapes, at CAPACITIES, with values that every op accepts."""
    arrays = {}
    for spec in OPS[op_name].schema.tensors:
        arrays[spec.name] = np.zeros(shape_of(spec), "float32" if spec.dtype == ANY_KV else spec.dtype)
    if "parent" in arrays:
        arrays["parent"][:] = np.arange(CAPACITIES["N"]) - 1
    if "logit_indices" in arrays:
        arrays["logit_indices"][:] = np.arange(CAPACITIES["M"])
    if "row_splits" in arrays:
        arrays["row_splits"][1:] = CAPACITIES["N"]
    if "covered" in arrays:
        arrays["covered"][0] = 7
    if "selected" in arrays:
        arrays["selected"][:] = -1
    if "queries" in arrays:
        arrays["kept_count"][0] = 2
    return arrays


def create(op_name, arrays):
    return native.create(op_name, arrays, ATTRIBUTES.get(op_name))


def extents_of(op_name):
    return tuple(CAPACITIES[extent] for extent in OPS[op_name].schema.extents)


@pytest.mark.parametrize(("op_name", "tensor"), BOUND_TENSORS)
def test_arrays_that_are_not_the_schemas_are_refused_by_name(op_name, tensor):
    schema, arrays = OPS[op_name].schema, arrays_of(op_name)
    array = arrays[tensor]
    rank = re.escape(", ".join(str(size) for size in array[None].shape))
    wrong = [
        (array.astype("int16"), TypeError, f"{op_name}: tensor '{tensor}' must be .*{array.dtype}.*; found int16"),
        (array[None], ValueError, f"{op_name}: tensor '{tensor}' must be .*; found .*{rank}"),
    ]
    spec = next(spec for spec in schema.tensors if spec.name == tensor)
    others = {dim for other in schema.tensors if other.name != tensor for dim in other.shape}
    others |= {"E"} if "R" in others else set()  # E is R + 1
    if any(isinstance(dim, int) or dim in others for dim in spec.shape):  # a size that is fixed, or another tensor's
        larger = np.zeros([size + 1 for size in array.shape], array.dtype)
        wrong.append((larger, ValueError, f"{op_name}: tensor '.*' must be"))
    if array.size > 1:
        wrong.append((np.zeros((*array.shape, 2), array.dtype)[..., 0], ValueError, f"'{tensor}' .* gaps"))
    if spec in schema.outputs:
        fixed = array.copy()
        fixed.flags.writeable = False
        wrong.append((fixed, ValueError, f"'{tensor}' .* read-only"))
    for value, error, sentence in wrong:
        with pytest.raises(error, match=sentence):
            create(op_name, arrays | {tensor: value})


def test_read_only_inputs_are_fine():
    arrays = arrays_of("BimMask")
    arrays["bim"].flags.writeable = False
    native.create("BimMask", arrays)(*extents_of("BimMask"))


def test_other_values_and_names_are_refused():
    arrays = arrays_of("BimMask")
    for name, value, error, sentence in (
        ("bim", [1, 2], TypeError, r"'bim' must be a C-contiguous NumPy array int64 .*; found a list"),
        ("bim", arrays["bim"].astype(">i8"), TypeError, r"'bim' .* other byte order"),
        ("parent", np.zeros(9, np.int64), ValueError, r"int64 \[N=6\]; found int64 \[9\]"),
        ("row_splits", np.zeros(3, np.int64), ValueError, r"'row_splits' .* int64 \[E=4\]; found int64 \[3\]"),
        ("tokens", arrays["bim"], ValueError, "BimMask: unknown tensor tokens"),
    ):
        with pytest.raises(error, match=sentence):
            native.create("BimMask", arrays | {name: value})
    for op, given, attributes, sentence in (
        ("Mask", arrays, {}, "There is no op 'Mask'; the ops are BimMask, "),
        ("TreeExpand", {}, {}, "TreeExpand stands in graphs only"),
        ("BimMask", {}, {}, "BimMask: missing tensor .*bim"),
        ("Sample", arrays_of("Sample"), {"purposes": 1}, "Sample: unknown attribute purposes"),
    ):
        with pytest.raises(ValueError, match=sentence):
            native.create(op, given, attributes)


@pytest.mark.parametrize("op_name", KERNELS)
def test_calls_with_the_wrong_number_or_kind_of_extents_are_refused(op_name):
    op = create(op_name, arrays_of(op_name))
    with pytest.raises(TypeError):
        op(*extents_of(op_name), 1)
    with pytest.raises(TypeError):
        op(*(["1"] * max(1, len(extents_of(op_name)))))


@pytest.mark.parametrize("op_name", KERNELS)
def test_a_bound_op_keeps_its_arrays_alive_and_calls_allocate_nothing(op_name):
    arrays = arrays_of(op_name)
    if "sampling" in arrays:
        arrays["sampling"][:] = Sampling(temperature=0.8, top_k=4, top_p=0.9)
    watched = arrays["attn_bias"] if op_name == "BimMask" else next(iter(arrays.values()))
    references = sys.getrefcount(watched)
    op, extents = create(op_name, arrays), extents_of(op_name)
    assert sys.getrefcount(watched) == references + 1
    op(*extents)
    tracemalloc.start()
    try:
        op(*extents)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            op(*extents)
        assert tracemalloc.get_traced_memory()[0] - before < 1000
    finally:
        tracemalloc.stop()
    del op
    assert sys.getrefcount(watched) == references


def test_threads_choose_independently_while_the_lock_is_released():
    """Rows long enough that the interpreter lock is released; scratch memory is per thread."""
    rng, bound = np.random.default_rng(0), []
    for seed in range(3):
        arrays = arrays_of("Sample") | {"logits": rng.normal(size=(5, 100_000)).astype(np.float32)}
        arrays["sampling"][:], arrays["seed"][:] = Sampling(temperature=1.0, top_p=0.9), seed
        op = native.create("Sample", arrays)
        op(5, 5)
        bound.append((op, arrays["committed"], arrays["committed"].tolist()))
        arrays["committed"][:] = -1
    threads = [threading.Thread(target=lambda op=op: [op(5, 5) for _ in range(5)]) for op, _, _ in bound]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(committed.tolist() == alone for _, committed, alone in bound)


def test_a_missing_extension_says_what_to_do(tmp_path):
    """A copy of the sources without the extension, as in a checkout that was never installed."""
    source = Path(plugins.__file__).parent
    copied = tmp_path / "outrider" / "plugins"
    copied.mkdir(parents=True)
    (tmp_path / "outrider" / "__init__.py").touch()
    (tmp_path / "outrider" / "plans").symlink_to(source.parent / "plans")
    for name in ("__init__.py", "native.py", "schema.py", "cuda", "ops", "reference", "tensorrt"):
        (copied / name).symlink_to(source / name)
    script = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, type)]; "  # no editable install
        f"sys.path[:0] = [{str(tmp_path)!r}]; import outrider.plugins.native"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 1
    assert "pip install -e ." in result.stderr


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("_VERSION", onnxruntime_ops._VERSION + 1, r"of our ops, and .* is wanted\. Run `pip install -e \.`"),
        ("folder", lambda: Path("nowhere"), r"outrider_onnxruntime.* is missing"),
    ],
)
def test_a_library_of_other_sources_and_one_that_was_not_built_are_refused(
    monkeypatch: pytest.MonkeyPatch, name, value, sentence
) -> None:
    monkeypatch.setattr(onnxruntime_ops, name, value)
    onnxruntime_ops.cpu_library.cache_clear()
    try:
        with pytest.raises(ImportError, match=sentence):
            onnxruntime_ops.cpu_library()
    finally:
        onnxruntime_ops.cpu_library.cache_clear()
