"""The loop that every training here shares: Muon and AdamW, rates and windows by progress, checkpoints.

Progress is the share of the training time used, so that a GPU and two CPU cores run the same schedule, and a run
that is stopped continues from its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.plans.errors import CheckpointError

MUON_LR, ADAM_LR, WEIGHT_DECAY, WARMUP, DECAY_FROM = 4e-3, 3e-3, 0.05, 0.01, 0.6

Schedule = tuple[tuple[float, int], ...]
"""Window lengths, each with the progress from which it holds."""


@dataclass(frozen=True)
class Run:
    """Settings of a training from the command line. `minutes` is training time; saving and measuring come on top."""

    minutes: float
    work: Path
    out: Path
    save_minutes: float
    device: str
    device_name: str


@dataclass(frozen=True)
class Batch:
    """One step's work: the loss to go down on, the tokens it saw, and what to print of it."""

    loss: Tensor
    tokens: int
    label: str


def rate(progress: float) -> float:
    """Share of the full learning rate: linear up over WARMUP, constant, linear down to 2 % from DECAY_FROM."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return 1.0 if progress < DECAY_FROM else max(0.02, (1 - progress) / (1 - DECAY_FROM))


def window_at(schedule: Schedule, progress: float) -> int:
    return [size for start, size in schedule if progress >= start][-1]


def optimizers(model: nn.Module, matrices: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for `matrices`, AdamW for the rest of the model's parameters."""
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(list(matrices), lr=MUON_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)]


@dataclass
class Training:
    """A model, its optimizers and how far it has come. `matrices` are the parameters that Muon trains.

    `muon_lr` is Muon's full rate. `identity` says what the checkpoint belongs to (a drafter's target and geometry);
    another identity's checkpoint is refused. `used` is in seconds.
    """

    model: nn.Module
    matrices: Sequence[nn.Parameter]
    checkpoint: Path
    identity: Mapping[str, str] = field(default_factory=dict)
    muon_lr: float = MUON_LR
    step: int = 0
    used: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self._optimizers = optimizers(self.model, self.matrices)

    def resume(self, device: str) -> bool:
        """Continue from the checkpoint, if there is one. Raises `CheckpointError` where it belongs to another model."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, weights_only=True, map_location=device)
        for key, value in self.identity.items():
            found = state.get("identity", {}).get(key)
            if found != value:
                raise CheckpointError(
                    f"{self.checkpoint} was trained with another {key} ({found}, now {value}); remove it to start "
                    "anew, or give another --name"
                )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.used, self.tokens = state["step"], state["used"], state["tokens"]
        print(f"resumed at step {self.step}, {self.used / 60:.1f} minutes", flush=True)
        return True

    def save(self) -> None:
        state: dict[str, object] = {"model": self.model.state_dict()}
        state["optimizers"] = [o.state_dict() for o in self._optimizers]
        state |= {"step": self.step, "used": self.used, "tokens": self.tokens}
        if self.identity:
            state["identity"] = dict(self.identity)
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").rename(self.checkpoint)

    def run(self, run: Run, take: Callable[[float], Batch], saved: Callable[[], None]) -> None:
        """Train until `run.minutes` are used. `take` computes a loss at a progress; `saved` follows each checkpoint
        but the last, and its time does not count."""
        total = run.minutes * 60
        mean, last_save, last = 0.0, self.used, time.perf_counter()
        while self.used < total:
            batch = self._descend(self.used / total, take)
            value = float(batch.loss.detach())
            mean = value if not mean else 0.97 * mean + 0.03 * value
            now = time.perf_counter()
            self.used, last = self.used + now - last, now
            self.step, self.tokens = self.step + 1, self.tokens + batch.tokens
            if self.step % 20 == 0:
                print(
                    f"step {self.step} {self.used / 60:.1f} min {batch.label} loss {mean:.3f} "
                    f"{self.tokens / self.used:.0f} tok/s",
                    flush=True,
                )
            if self.used - last_save > run.save_minutes * 60:
                self.save()
                saved()
                last_save, last = self.used, time.perf_counter()
        self.save()

    def report(self, device_name: str) -> dict[str, str]:
        """The first rows of a model card."""
        return {
            "minutes": f"{self.used / 60:.0f} on {device_name}",
            "steps": str(self.step),
            "tokens": f"{self.tokens:,}",
        }

    def _descend(self, progress: float, take: Callable[[float], Batch]) -> Batch:
        for optimizer, base in zip(self._optimizers, (self.muon_lr, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate(progress)
        batch = take(progress)
        batch.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return batch
