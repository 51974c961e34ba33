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
from outrider.plugins.schema import ANY_KV
from outrider.plugins.schemas import SCHEMAS

CAPACITIES = {"N": 6, "T": 40, "M": 5, "V": 11, "B": 2, "trees": 3, "capacity": 32, "planes": 2, "heads": 2}
CAPACITIES |= {"head_dim": 4, "slot_size": 4, "R": 3, "E": 4, "S": 6}
CAPACITIES |= {"depths": 5}
CAPACITIES |= {"layers": 1, "blocks": 9, "retrieval": 3, "partial_capacity": 20, "num_heads * head_dim": 16}
LAYOUT = {"block_size": 2, "sink_blocks": 1, "window_blocks": 1}
ATTRIBUTES = dict.fromkeys(("BlockSummary", "BlockSelect", "PartialKvGather"), LAYOUT)
GRAPH_OPS = (
    *("BranchAttention", "DraftSample", "MixtureOfExperts", "Route", "TreeExpand", "TreeRerank", "WindowBias"),
)
KERNELS = [name for name in SCHEMAS if name not in GRAPH_OPS]
BOUND_TENSORS = [(name, spec.name) for name in KERNELS for spec in SCHEMAS[name].tensors]


def shape_of(spec):
    return tuple(CAPACITIES[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def arrays_of(op_name):
    """Arrays of the schema's dtypes and shapes, at CAPACITIES, with values that every op accepts."""
    arrays = {}
    for spec in SCHEMAS[op_name].tensors:
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
    return tuple(CAPACITIES[extent] for extent in SCHEMAS[op_name].extents)


@pytest.mark.parametrize("op_name", KERNELS)
def test_every_op_binds_by_its_schema_and_runs(op_name):
    create(op_name, arrays_of(op_name))(*extents_of(op_name))


@pytest.mark.parametrize(("op_name", "tensor"), BOUND_TENSORS)
def test_a_wrong_dtype_is_refused_by_name(op_name, tensor):
    arrays = arrays_of(op_name)
    found = arrays[tensor].dtype
    arrays[tensor] = arrays[tensor].astype("int16")
    with pytest.raises(TypeError, match=f"{op_name}: tensor '{tensor}' must be .*{found}.*; found int16"):
        create(op_name, arrays)


@pytest.mark.parametrize(("op_name", "tensor"), BOUND_TENSORS)
def test_a_wrong_rank_is_refused_by_name(op_name, tensor):
    arrays = arrays_of(op_name)
    arrays[tensor] = arrays[tensor][None]
    found = re.escape(", ".join(str(size) for size in arrays[tensor].shape))
    with pytest.raises(ValueError, match=f"{op_name}: tensor '{tensor}' must be .*; found .*{found}"):
        create(op_name, arrays)


@pytest.mark.parametrize(("op_name", "tensor"), BOUND_TENSORS)
def test_sizes_that_contradict_the_schema_are_refused(op_name, tensor):
    """One more in every axis: a fixed size is broken, or a symbol that another tensor shares."""
    arrays = arrays_of(op_name)
    spec = next(spec for spec in SCHEMAS[op_name].tensors if spec.name == tensor)
    others = {dim for other in SCHEMAS[op_name].tensors if other.name != tensor for dim in other.shape}
    others |= {"E"} if "R" in others else set()  # E is R + 1
    if not any(isinstance(dim, int) or dim in others for dim in spec.shape):
        pytest.skip("no size of this tensor is tied to another")
    arrays[tensor] = np.zeros([size + 1 for size in arrays[tensor].shape], arrays[tensor].dtype)
    with pytest.raises(ValueError, match=f"{op_name}: tensor '.*' must be"):
        create(op_name, arrays)


@pytest.mark.parametrize(("op_name", "tensor"), BOUND_TENSORS)
def test_arrays_with_gaps_are_refused(op_name, tensor):
    arrays = arrays_of(op_name)
    shape = arrays[tensor].shape
    if max(shape) == 1:
        pytest.skip("a single element has no gaps")
    arrays[tensor] = np.zeros((*shape, 2), arrays[tensor].dtype)[..., 0]
    with pytest.raises(ValueError, match=f"'{tensor}' .* gaps"):
        create(op_name, arrays)


@pytest.mark.parametrize(
    ("op_name", "tensor"), [(name, spec.name) for name in KERNELS for spec in SCHEMAS[name].outputs]
)
def test_read_only_outputs_are_refused(op_name, tensor):
    arrays = arrays_of(op_name)
    arrays[tensor].flags.writeable = False
    with pytest.raises(ValueError, match=f"'{tensor}' .* read-only"):
        create(op_name, arrays)


def test_read_only_inputs_are_fine():
    arrays = arrays_of("BimMask")
    arrays["bim"].flags.writeable = False
    native.create("BimMask", arrays)(*extents_of("BimMask"))


def test_what_is_no_array_and_foreign_byte_order_are_refused():
    arrays = arrays_of("BimMask")
    with pytest.raises(TypeError, match=r"'bim' must be a C-contiguous NumPy array int64 .*; found a list"):
        native.create("BimMask", arrays | {"bim": [1, 2]})
    with pytest.raises(TypeError, match=r"'bim' .* other byte order"):
        native.create("BimMask", arrays | {"bim": arrays["bim"].astype(arrays["bim"].dtype.newbyteorder())})


def test_the_sizes_bound_so_far_are_in_the_sentence():
    arrays = arrays_of("BimMask") | {"parent": np.zeros(9, np.int64)}
    with pytest.raises(ValueError, match=r"int64 \[N=6\]; found int64 \[9\]"):
        native.create("BimMask", arrays)


@pytest.mark.parametrize("op_name", ["BimMask", "KvGather"])
@pytest.mark.parametrize("edges", [3, 5])
def test_row_splits_have_one_edge_more_than_there_are_rows(op_name, edges):
    arrays = arrays_of(op_name) | {"row_splits": np.zeros(edges, np.int64)}
    with pytest.raises(ValueError, match=rf"{op_name}: tensor 'row_splits' .* int64 \[E=4\]; found int64 \[{edges}\]"):
        create(op_name, arrays)


def test_names_are_checked():
    arrays = arrays_of("BimMask")
    with pytest.raises(ValueError, match="There is no op 'Mask'; the ops are BimMask, "):
        native.create("Mask", arrays)
    for name in GRAPH_OPS:
        with pytest.raises(ValueError, match=f"{name} stands in graphs only"):
            native.create(name, {})
    with pytest.raises(ValueError, match="BimMask: unknown tensor tokens"):
        native.create("BimMask", arrays | {"tokens": arrays["bim"]})
    del arrays["bim"]
    with pytest.raises(ValueError, match="BimMask: missing tensor bim"):
        native.create("BimMask", arrays)
    with pytest.raises(ValueError, match="Sample: unknown attribute purposes"):
        native.create("Sample", arrays_of("Sample"), {"purposes": 1})


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
    rng = np.random.default_rng(0)
    results, expected = {}, {}

    def bound(seed):
        arrays = arrays_of("Sample") | {"logits": rng.normal(size=(5, 100_000)).astype(np.float32)}
        arrays["sampling"][:], arrays["seed"][:] = Sampling(temperature=1.0, top_p=0.9), seed
        return native.create("Sample", arrays), arrays["committed"]

    ops = {seed: bound(seed) for seed in range(3)}
    for seed, (op, committed) in ops.items():
        op(5, 5)
        expected[seed] = committed.tolist()
        committed[:] = -1

    def work(seed):
        op, committed = ops[seed]
        for _ in range(5):
            op(5, 5)
        results[seed] = committed.tolist()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in ops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_a_missing_extension_says_what_to_do(tmp_path):
    """A copy of the sources without the extension, as in a checkout that was never installed."""
    source = Path(plugins.__file__).parent
    copied = tmp_path / "outrider" / "plugins"
    copied.mkdir(parents=True)
    (tmp_path / "outrider" / "__init__.py").touch()
    (tmp_path / "outrider" / "plans").symlink_to(source.parent / "plans")
    for name in ("__init__.py", "native.py", "schema.py", "schemas.py", "kv_schemas.py", "expert_schemas.py"):
        (copied / name).write_text((source / name).read_text())
    script = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, type)]; "  # no editable install
        f"sys.path[:0] = [{str(tmp_path)!r}]; import outrider.plugins.native"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 1
    assert "pip install -e ." in result.stderr


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_ops, "_VERSION", onnxruntime_ops._VERSION + 1)
    onnxruntime_ops.cpu_library.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"of our ops, and .* is wanted\. Run `pip install -e \.`"):
            onnxruntime_ops.cpu_library()
    finally:
        onnxruntime_ops.cpu_library.cache_clear()


def test_a_library_that_was_not_built_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnxruntime_ops, "folder", lambda: tmp_path)
    onnxruntime_ops.cpu_library.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"outrider_onnxruntime.* is missing"):
            onnxruntime_ops.cpu_library()
    finally:
        onnxruntime_ops.cpu_library.cache_clear()
