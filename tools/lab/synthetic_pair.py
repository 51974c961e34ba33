"""Write a random target and a draft model: `python -m outrider.tools.lab.synthetic_pair --params 150m --out DIR`.

For measuring speculation at sizes that nobody here has trained. The target is a random Qwen3 whose layers after the
first few contribute little to the residual stream; the draft model is those first layers under the same embedding,
norm and head. How little is found by bisection: until the draft model's best token is the target's `--agreement` of
the time, along the target's own greedy text.

A random model that decodes greedily soon runs in a circle, which n-grams would predict and caches would flatter.
Here the gain of the query norms makes attention pick single tokens out of the whole context instead of averaging
it, so that the state keeps changing: the figures that are printed count repeated 4-grams and loops.

`--like llama-3.2-1b` writes instead, without a draft model, a random Llama of that geometry, of which no more than one
layer is ever in memory, and a recipe with weights of 4 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from outrider.commands.arguments import Parser, at_least_0, at_least_1, number
from outrider.commands.console import guarded, print_json, progress_bar, stdout
from outrider.plans.errors import OutriderError, UsageError
from outrider.tools.lab.reference.prompts import read_completions
from outrider.tools.lab.synthetic_llama import SHAPES, write_llama

TEXT = Path(__file__).resolve().parents[2] / "plans" / "reference" / "held_out.jsonl.gz"
MERGES = TEXT.with_name("pair_merges.txt")
"""Of a byte-level BPE of VOCABULARY tokens, trained on held-out code."""
VOCABULARY, HEAD_DIM, CONTEXT = 1024, 64, 4096
QUERY_GAIN = 4.0  # of 256-token greedy texts at 10m: 0.2 % repeated 4-grams, no loop; at 1.0: 30 %, half of them loop
END = "<|end|>"
GAMMA = 4
_PROMPT_TOKENS, _TEXTS = 32, 8
_SHORT, _LONG = 64, 256  # tokens of a text: to bisect with, and to judge
_BISECTIONS = 7
_NGRAM = 4


@dataclass(frozen=True)
class Shape:
    """Geometry of the target. `layers` of equal size; heads of 64, half as many for keys and values."""

    layers: int
    hidden: int
    intermediate: int

    @classmethod
    def from_parameters(cls, parameters: int, layers: int | None) -> Shape:
        """The shape of a target with about this many parameters, embedding and head included."""
        layers = layers or max(4, round(24 * (parameters / 150e6) ** 0.25))
        hidden = max(1, round(math.sqrt(parameters / (12 * layers)) / (2 * HEAD_DIM))) * 2 * HEAD_DIM
        rest = parameters - 2 * VOCABULARY * hidden - layers * 3 * hidden**2
        intermediate = round(rest / (3 * hidden * layers) / 32) * 32  # whole blocks of any quantised format
        if intermediate < 32:
            raise OutriderError(
                f"--params {parameters} is too small for {layers} layers; pass at least 1m, or fewer --layers"
            )
        return cls(layers, hidden, intermediate)


def write_pair(
    parameters: int,
    out: Path,
    *,
    layers: int | None = None,
    draft_layers: int = 1,
    agreement: float = 0.62,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> dict[str, object]:
    """Write `out/target`, `out/draft`, `out/held_out.jsonl` and `out/model.yaml`; returns what was made."""
    shape = Shape.from_parameters(parameters, layers)
    if not 1 <= draft_layers < shape.layers:
        raise OutriderError(
            f"--draft-layers is {draft_layers}; the target has {shape.layers} layers, pass 1 to {shape.layers - 1}"
        )
    _check_empty(out)
    steps = _BISECTIONS + 3
    progress(0, steps, "drawing weights")
    target = draw_target(shape, seed)
    draft = first_layers(target, draft_layers)
    tokenizer, prompts = read_text()
    ids = _prompt_ids(tokenizer, prompts)

    low, high, share = 1e-3, 3.0, 1.0  # contribution of the later layers
    for step in range(_BISECTIONS):
        progress(1 + step, steps, "how much the later layers may contribute")
        middle = math.sqrt(low * high)
        scale_layers(target, draft_layers, middle / share)
        share = middle
        low, high = (middle, high) if measure(target, draft, ids, _SHORT)["agreement"] > agreement else (low, middle)
    progress(steps - 2, steps, "measuring")
    quality = measure(target, draft, ids, _LONG)
    progress(steps - 1, steps, "writing")
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(out / name)
        _write_tokenizer(tokenizer, out / name)
    made = {
        "parameters": sum(p.numel() for p in target.parameters()),
        "draft_parameters": sum(p.numel() for p in draft.parameters()),
        **asdict(shape),
        "draft_layers": draft_layers,
        "seed": seed,
        "contribution": share,
        **quality,
    }
    return {"recipe": _write_recipe(out, _recipe(made), prompts), **made}


def write_alone(
    like: str, out: Path, *, seed: int = 0, progress: Callable[[int, int, str], None] = lambda *_: None
) -> dict[str, object]:
    """Write `out/target`, of the geometry `like`, `out/held_out.jsonl` and `out/model.yaml`; returns what was made."""
    _check_empty(out)
    shape = SHAPES[like]
    write_llama(shape, out / "target", CONTEXT, seed, progress)
    tokenizer, prompts = read_text()
    _write_tokenizer(tokenizer, out / "target")
    recipe = _write_recipe(out, _recipe_alone(like), prompts)
    return {"recipe": recipe, "parameters": shape.parameters, **asdict(shape), "seed": seed}


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutriderError(f"{out} exists and is not an empty folder; choose another --out")


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n", encoding="utf-8")


def _write_recipe(out: Path, recipe: str, prompts: list[str]) -> str:
    rows = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (out / "held_out.jsonl").write_text("".join(rows), encoding="utf-8")
    (out / "model.yaml").write_text(recipe, encoding="utf-8")
    return str(out / "model.yaml")


def draw_target(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """Weights of variance 1 / inputs: every layer adds about as much as there is. The head is not the embedding, under
    which every token would ask for itself again."""
    logging.disable_progress_bar()  # ours is the one on the terminal
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD_DIM,
        num_key_value_heads=shape.hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(QUERY_GAIN if "q_norm" in name else 1.0)
            else:
                spread = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, spread, generator=generator)
    return model


def scale_layers(model: Qwen3ForCausalLM, start: int, factor: float) -> None:
    """Multiply what the layers from `start` on add to the residual stream."""
    with torch.no_grad():
        for layer in model.model.layers[start:]:
            layer.self_attn.o_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)


def first_layers(target: Qwen3ForCausalLM, layers: int) -> Qwen3ForCausalLM:
    """A model of the target's first layers, which shares their memory."""
    settings = target.config.to_dict() | {"num_hidden_layers": layers}
    settings["layer_types"] = (target.config.layer_types or [])[:layers]
    draft = Qwen3ForCausalLM(Qwen3Config(**settings))
    draft.eval()
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()}, assign=True)
    return draft


def measure(target: Qwen3ForCausalLM, draft: Qwen3ForCausalLM, prompts: torch.Tensor, tokens: int) -> dict[str, float]:
    """Decode `tokens` greedy tokens after each prompt `[texts, length]`, and ask the draft model along the way.

    `agreement`: share of the tokens that the draft model would have chosen. `tokens_per_verify`: with chains of 4.
    `repeated`: share of 4-grams that stand earlier in the same text. `looping`: texts that end in a circle.
    """
    with torch.inference_mode():
        out = target(prompts, use_cache=True)
        pieces = [prompts]
        for _ in range(tokens):
            pieces.append(out.logits[:, -1:].argmax(-1))
            if len(pieces) <= tokens:
                out = target(pieces[-1], past_key_values=out.past_key_values, use_cache=True)
        text = torch.cat(pieces, dim=1)
        proposed = draft(text[:, :-1], use_cache=False).logits[:, prompts.shape[1] - 1 :].argmax(-1)
    texts = text[:, prompts.shape[1] :].tolist()
    right = (proposed == text[:, prompts.shape[1] :]).tolist()
    verified = [count for row in right for count in commits(row, GAMMA)]
    return {
        "agreement": sum(map(sum, right)) / (len(texts) * tokens),
        "tokens_per_verify": sum(verified) / len(verified),
        "repeated": sum(map(repeated, texts)) / len(texts),
        "looping": sum(map(loops, texts)),
        "texts": len(texts),
        "tokens": tokens,
    }


def commits(right: list[bool], gamma: int) -> list[int]:
    """Tokens that each step with chains of `gamma` commits, where `right` says which proposals are."""
    found, at = [], 0
    while at + gamma < len(right):
        accepted = next((i for i in range(gamma) if not right[at + i]), gamma)
        found.append(accepted + 1)
        at += accepted + 1
    return found


def repeated(tokens: list[int]) -> float:
    """Share of 4-grams that stand earlier in the text."""
    grams = [tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def loops(tokens: list[int]) -> bool:
    """Whether the text ends in three or more rounds of one circle."""
    size = len(tokens)
    return any(tokens[size - 3 * p : size - p] == tokens[size - 2 * p :] for p in range(1, size // 3 + 1))


def read_text() -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and the repository's held-out prompts of the task completion."""
    merges = [(left, right) for left, right in map(str.split, MERGES.read_text(encoding="utf-8").splitlines())]
    tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [str(row["prompt"]) for row in read_completions(TEXT)]


def _prompt_ids(tokenizer: Tokenizer, prompts: list[str]) -> torch.Tensor:
    encoded = (tokenizer.encode(prompt).ids for prompt in prompts)
    enough = [ids[:_PROMPT_TOKENS] for ids in encoded if len(ids) >= _PROMPT_TOKENS]
    return torch.tensor(enough[:_TEXTS])


def _recipe(made: dict[str, object]) -> str:
    millions = round(int(str(made["parameters"])) / 1e6)
    return f"""\
# A random pair, written by tools.lab.synthetic_pair: {made["parameters"]:,} parameters in {made["layers"]} layers, and
# a draft model of the first {made["draft_layers"]} ({made["draft_parameters"]:,} parameters), right \
{made["agreement"]:.0%} of the time.
name: synthetic-{millions}m
target:
  checkpoint: target
drafters:
  - {{name: draft, kind: model, checkpoint: draft, gamma: {GAMMA}}}
capacity:
  context: 2048
held_out: held_out.jsonl
"""


def _recipe_alone(like: str) -> str:
    return f"""\
# A random Llama of the geometry of {like}, written by tools.lab.synthetic_pair, in 4 bits and without a draft model.
name: synthetic-{like}
target:
  checkpoint: target
  weights: {{type: int4}}
drafters:
  - {{name: ngram, kind: ngram}}
capacity:
  context: 2048
held_out: held_out.jsonl
"""


def _count(text: str) -> int:
    """A number of parameters, such as 150m, 1.5m or 2000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a number of parameters, such as 10m, 40m or 150m")
    return round(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]])


def _share(text: str) -> float:
    share = number(most=1, above=0)(text)
    if share == 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a number between 0 and 1")
    return share


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.synthetic_pair",
        description="Write a random Qwen3 target, a draft model made of its first layers, a byte-level tokenizer and "
        "the recipe of the pair, for measuring speculation at sizes where weights dominate; or, with --like, a large "
        "target alone, with a recipe in 4 bits.",
        epilog="example: %(prog)s --params 150m --out build/synthetic-150m, then "
        "python -m outrider.compiler build build/synthetic-150m/model.yaml --out build/synthetic-150m/plan",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=_count, help="the target's parameters: 10m, 40m, 150m ...")
    size.add_argument(
        "--like", choices=tuple(SHAPES), help="instead of a pair, a Llama of this geometry, written layer by layer"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write, new or empty")
    parser.add_argument("--layers", type=at_least_1, help="of the target (default: 12 at 10m, 24 at 150m)")
    parser.add_argument("--draft-layers", type=at_least_1, help="of the draft model (default 1)")
    parser.add_argument("--agreement", type=_share, help="how often the draft model is to be right (default 0.62)")
    parser.add_argument("--seed", type=at_least_0, default=0, help="of the weights (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: list[str] | None = None) -> int:
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    pair = {name: getattr(options, name) for name in ("layers", "draft_layers", "agreement")}
    given = {name: value for name, value in pair.items() if value is not None}
    if options.like is not None and given:
        raise UsageError(f"--{next(iter(given)).replace('_', '-')} is of a pair; leave it out, or pass --params")
    with progress_bar("synthetic model") as progress:
        if options.like is not None:
            made = write_alone(options.like, options.out, seed=options.seed, progress=progress)
        else:
            made = write_pair(options.params, options.out, seed=options.seed, progress=progress, **given)
    if options.json:
        print_json(made)
        return 0
    stdout.print(f"{made['recipe']}: {made['parameters']:,} parameters in {made['layers']} layers")
    if options.like is None:
        stdout.print(
            f"a draft model of {made['draft_layers']} with {made['draft_parameters']:,}; on {made['texts']} greedy "
            f"texts of {made['tokens']} tokens right {made['agreement']:.0%}, {made['tokens_per_verify']:.2f} tokens "
            f"per verify with chains of {GAMMA}, {made['repeated']:.1%} repeated 4-grams, {made['looping']} looping"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
