"""The recipe: what to compile, and for what. The fields here are the documentation of `model.yaml`.

`recipe_keys.py` prints them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import Field, JsonValue, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from outrider.compiler.backends import DEFAULT_BACKENDS, BackendEntry, choose_backends
from outrider.compiler.backends.base import Backend
from outrider.compiler.formats.gguf_file import is_gguf
from outrider.compiler.models.config import DecoderConfig, WeightType
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.recipe_drafters import Device, DrafterSection, GraphSection, ModelSection
from outrider.compiler.recipe_sections import (
    PartialKvSection,
    RopeScalingSection,
    Section,
    WeightsSection,
    WrittenPath,
    check_distinct,
    positions_served,
)
from outrider.compiler.recipe_source import Location, RecipeSource
from outrider.plans import names
from outrider.plans.buffers import DType, Name
from outrider.plans.errors import PlanError, RecipeError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.kv_slots import KvType
from outrider.plans.manifest import Manifest, ToolParser
from outrider.plans.plan import read_manifest
from outrider.plans.skeleton import is_branch_template

# Keys that may differ between a plan and its recipe: paths, whose contents are hashed (held-out text is in no plan),
# and backends, because only one of them runs.
_MAY_DIFFER = re.compile(r"(target|drafters\[\d+\])\.(checkpoint|weights\.calibration)|held_out|backends\[.*")


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TargetSection(Section):
    """The model whose output counts."""

    checkpoint: WrittenPath = Field(
        description="folder of a Hugging Face checkpoint, or a GGUF file, relative to the recipe"
    )
    dtype: WeightType = Field("float32", description="type of the compiled weights")
    weights: WeightsSection | None = Field(
        None, description="quantised weights; without it they are of `dtype`, or the checkpoint's own integers"
    )
    rope_scaling: RopeScalingSection | None = Field(None, description="replaces the checkpoint's own rotary scaling")
    tool_parser: ToolParser | None = Field(
        None, description="format in which the model writes calls of tools; without it as its chat template prints them"
    )


class CapacitySection(Section):
    """Sizes of a session. Every buffer is allocated once, in these sizes."""

    context: int = Field(ge=2, le=2**23, description="tokens of the longest sequence, prompt and output together")
    branches: int = Field(1, ge=1, le=128, description="independent continuations at once")
    batching: bool = Field(
        False,
        description="a row of the KV cache for every branch as well, so that they can run in batching mode; takes "
        "memory that grows with the square of branches",
    )
    prefill_chunk: int = Field(
        default_factory=lambda capacity: min(256, capacity.get("context", 256)),
        ge=1,
        description="tokens of a prompt computed in one pass; 256, or the context where that is shorter",
    )

    @field_validator("batching")
    @classmethod
    def _of_several(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("branches") == 1:
            raise PydanticCustomError("batching", "is true, and capacity.branches is 1; set that to 2 or more")
        return value

    @field_validator("prefill_chunk")
    @classmethod
    def _not_above_context(cls, value: int, info: ValidationInfo) -> int:
        context = info.data.get("context", value)
        if value > context:
            raise PydanticCustomError(
                "chunk",
                "is {value}, more than capacity.context {context}; set it to at most {context}",
                {"value": value, "context": context},
            )
        return value


class SkeletonSection(Section):
    """How `outrider skeleton` outlines an answer, and begins the branches of its points."""

    system: str | None = Field(None, description="a system message before every question")
    tools: tuple[ToolName, ...] = Field((), strict=False, description="tools that a point may ask for")
    most_points: int = Field(16, ge=1, le=16, description="points of the longest outline")
    direct: bool = Field(True, description="whether an answer may be given without an outline")
    outline_tokens: int = Field(384, ge=1, le=2**23, description="tokens of the longest outline")
    branch: str = Field(
        "{outline}\n{point}\n",
        description="what a point's branch begins with after the question: {outline}, and {point}, its line",
    )

    @field_validator("branch")
    @classmethod
    def _has_the_point(cls, value: str) -> str:
        if not is_branch_template(value):
            raise PydanticCustomError("template", "must have {point}, and may have {outline}; double other braces")
        return value


class Recipe(Section):
    """One `model.yaml`: what to compile, and for what. Paths in it are relative to the file."""

    name: Name = Field(description="name of the plan: small letters, digits, and -_. after the first")
    target: TargetSection = Field(description="the model whose output counts")
    drafters: tuple[DrafterSection, ...] = Field(
        (), strict=False, description="what proposes tokens; the first is the default; may be empty"
    )
    capacity: CapacitySection = Field(description="what a session can hold")
    kv_cache: KvType | None = Field(
        None,
        description="type of keys and values in every model's KV cache; without it, that of the weights (dtype). int8 "
        "has a scale for each key and value of each head",
    )
    backends: tuple[BackendEntry, ...] = Field(
        DEFAULT_BACKENDS,
        strict=False,
        description="backends to build engines for: names, or {kind: NAME, ...} with options",
    )
    partial_kv: PartialKvSection = Field(
        default_factory=lambda: PartialKvSection(), description="verifying in a partial KV cache after long contexts"
    )
    skeleton: SkeletonSection | None = Field(None, description="how answers are outlined; without it, by the defaults")
    held_out: WrittenPath | None = Field(
        None,
        description='JSONL file of {"prompt": ...}, or its .gz, that verify measures with, relative to the recipe',
    )

    _source: RecipeSource = PrivateAttr(default_factory=lambda: RecipeSource(Path("recipe")))

    @field_validator("drafters")
    @classmethod
    def _distinct_names(cls, drafters: tuple[DrafterSection, ...]) -> tuple[DrafterSection, ...]:
        seen = {
            "none": "means no drafter",
            names.TARGET: "means the target",
            names.PARTIAL: "means its partial KV cache",
        }
        for index, drafter in enumerate(drafters):
            if drafter.name in seen:
                context = {"name": drafter.name, "reason": seen[drafter.name], "at": (index, "name")}
                raise PydanticCustomError("name", "is '{name}', which {reason}; choose another name", context)
            seen[drafter.name] = "is the name of an earlier drafter"
        coupled = {d.name for d in drafters if not isinstance(d, HostDrafter) and d.acceptance == "coupled"}
        for index, drafter in enumerate(drafters):
            if isinstance(drafter, HostDrafter) and drafter.otherwise not in (None, *coupled):
                has = ", ".join(sorted(coupled)) or "none"
                context = {"name": str(drafter.otherwise), "has": has, "at": (index, "otherwise")}
                raise PydanticCustomError(
                    "otherwise", "is '{name}'; name a model, eagle3 or block drafter, not of rejection: {has}", context
                )
        return drafters

    @field_validator("backends")
    @classmethod
    def _distinct_backends(cls, backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
        check_distinct([backend.kind for backend in backends])
        return backends

    # Paths, absolute.

    @property
    def path(self) -> Path:
        """The file that the recipe was read from."""
        return self._source.path

    @property
    def checkpoint_path(self) -> Path:
        return self._absolute(self.target.checkpoint)

    def drafter_path(self, drafter: GraphSection) -> Path:
        return self._absolute(drafter.checkpoint)

    @property
    def held_out_path(self) -> Path | None:
        return None if self.held_out is None else self._absolute(self.held_out)

    def calibration_path(self, weights: WeightsSection | None) -> Path | None:
        """The file of text that quantised weights are searched on; None where they are not."""
        return None if weights is None or weights.calibration is None else self._absolute(weights.calibration)

    def cache_path(self, backend: Backend) -> Path | None:
        """The file that builds for a backend read and write beside the plan; None where there is none."""
        return None if backend.cache is None else self._absolute(backend.cache)

    def for_backends(self, kinds: Sequence[str]) -> Recipe:
        """Return the same recipe for the backends `kinds`. Raises `RecipeError` for an unknown backend."""
        return self.model_copy(update={"backends": choose_backends(self.backends, kinds)})

    def dtype(self, backend: Backend) -> WeightType:
        return backend.dtype or self.target.dtype

    def graph_dtype(self, backend: Backend) -> WeightType:
        """Dtype that a backend's graphs compute in."""
        return "float32" if backend.widens else self.dtype(backend)

    def kv_dtype(self, backend: Backend) -> DType:
        return DType(self.kv_cache or self.dtype(backend))

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """The rotary scaling that replaces the checkpoint's; None to keep the checkpoint's."""
        return None if self.target.rope_scaling is None else self.target.rope_scaling.scaling()

    @property
    def device(self) -> Device:
        """What defaults go by: a CPU where one of the backends is one."""
        return "cpu" if any(backend.support.on_processor for backend in self.backends) else "gpu"

    def resolved(self) -> dict[str, JsonValue]:
        """Return the recipe with every default filled in, as JSON values, for `plan.json` and the identity. Trees that
        are auto stay so: the manifest's drafters have them.

        Relative paths stay as written; of an absolute path only the last part is kept, so that the same inputs give
        the same plan wherever they lie (their contents are hashed apart).
        """
        values = self.model_dump(mode="json", exclude_none=True)
        for section in (values["target"], *values["drafters"]):
            for holder, key in ((section, "checkpoint"), (section.get("weights", {}), "calibration")):
                if key in holder:
                    holder[key] = _portable(holder[key])
        if not self.partial_kv.enabled:
            del values["partial_kv"]  # without partial KV its settings mean nothing
        if self.held_out is not None:
            values["held_out"] = _portable(self.held_out)
        return values

    def error(self, location: Location, clause: str) -> RecipeError:
        """Return the error `clause` about the key at `location`, with the line where the recipe sets the key."""
        return self._source.error(location, clause)

    def _absolute(self, written: str) -> Path:
        return (self._source.path.parent / os.path.expanduser(written)).resolve()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe, and that the files it names exist.

    `overrides` are `dotted.key=value` with a value in YAML (`capacity.context=8192`, `drafters[0].max_draft=4`) and
    win over the file. Raises `RecipeError` with one sentence per line, each with file, line and key.
    """
    source = RecipeSource.read(path, overrides)
    try:
        recipe = Recipe.model_validate(source.values)
    except ValidationError as invalid:
        raise source.errors(invalid, Recipe) from None
    recipe._source = source
    sections: list[tuple[Location, TargetSection | GraphSection]] = [(("target",), recipe.target)]
    sections += [(("drafters", i), d) for i, d in enumerate(recipe.drafters) if not isinstance(d, HostDrafter)]
    for location, section in sections:
        path = recipe._absolute(section.checkpoint)
        is_file = isinstance(section, TargetSection | ModelSection) and is_gguf(path) and path.is_file()
        if not path.is_dir() and not is_file:
            wanted = (
                "neither a folder nor a GGUF file"
                if isinstance(section, TargetSection | ModelSection)
                else "not a folder"
            )
            raise recipe.error((*location, "checkpoint"), f"names {path}, which is {wanted}; correct the path")
        text = recipe.calibration_path(section.weights)
        if text is not None and not text.is_file():
            raise recipe.error((*location, "weights", "calibration"), f"names {text}, which is not a file; correct it")
    for index, backend in enumerate(recipe.backends):
        cache = recipe.cache_path(backend)
        if cache is not None and (cache.is_dir() or not cache.parent.is_dir()):
            raise recipe.error(
                ("backends", index, "timing_cache"),
                f"names {cache}, which can be no file; name one in a folder that is there",
            )
    if recipe.held_out_path is not None and not recipe.held_out_path.is_file():
        raise recipe.error(("held_out",), f"names {recipe.held_out_path}, which is not a file; correct the path")
    return recipe


def source_recipe(plan: Path, *, option: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read again the recipe that `plan` was built from.

    Raises `PlanError` when the file is gone; the message offers `option`, which names another. Raises as `load_recipe`.
    """
    source = Path(os.path.normpath(plan.resolve() / read_manifest(plan).source))
    if not source.is_file():
        raise PlanError(f"{plan} was built from {source}, which is not there any more; pass {option}")
    return load_recipe(source, overrides)


def check_same_recipe(recipe: Recipe, plan: Path, manifest: Manifest) -> None:
    """Raise `PlanError` unless the plan was built from this recipe; contents of the checkpoints are not compared."""
    built, now = (dict(_flat(r)) for r in (manifest.recipe, recipe.resolved()))
    changed = [key for key in {**built, **now} if built.get(key) != now.get(key) and not _MAY_DIFFER.fullmatch(key)]
    if changed:
        key = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise PlanError(
            f"{plan} was built from another recipe: {key} is {built.get(key, 'not set')} in the plan and "
            f"{now.get(key, 'not set')} in the recipe{more}; repeat the build's --set, or build the plan again"
        )


def check_capacity(recipe: Recipe, config: DecoderConfig) -> None:
    """Check the recipe's capacity against `config`, the target's, read with `recipe.rope_scaling`.

    Raises `RecipeError` when the context exceeds the positions that the model, with its rotary scaling, is made for.
    """
    limit = positions_served(config, replaced=recipe.target.rope_scaling is not None)
    if recipe.capacity.context > limit:
        factor = -(-recipe.capacity.context // config.max_positions)
        raise recipe.error(
            ("capacity", "context"),
            f"is {recipe.capacity.context}, but the model is made for {limit} positions; lower it, or stretch the "
            f"model with target.rope_scaling, such as {{rope_type: yarn, factor: {factor}.0, "
            f"original_max_position_embeddings: {config.max_positions}}}",
        )


def _portable(written: str) -> str:
    path = PurePath(written)
    return path.name if path.is_absolute() else path.as_posix()


def _flat(value: JsonValue, key: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield the single values of a recipe by dotted key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{index}]")
    else:
        yield key, value
