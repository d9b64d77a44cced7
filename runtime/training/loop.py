"""The fit: windows of micro-batches in, optimizer updates, records and checkpoints out."""

import math
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from runtime import device
from runtime.errors import UserError
from runtime.progress import Progress
from runtime.training import checkpoints, draws
from runtime.training.batches import MicroBatch
from runtime.training.interruption import Wish, graceful
from runtime.training.session import Session

HEARTBEAT_S = 5.0


class NonFiniteError(UserError):
    """Loss or gradient is NaN or infinite; the adapter is still that of the step before."""


class NoGradientError(UserError):
    """The first step gave the adapter no gradient at all: nothing would ever be learned."""


@dataclass(slots=True, kw_only=True)
class Cursor:
    """Where the run stands. `state` is what trainer_state.json keeps of it."""

    step: int
    epoch: int
    loss_ema: list[float]
    saved_step: int
    updating: bool = False  # adapter, schedule, step and records don't agree at the moment
    last_heartbeat: float = field(default_factory=time.monotonic)


def fit(session: Session, progress: Progress) -> str:
    """Train to the planned step, or to a signal; returns the run's final state."""
    cursor = Cursor(
        step=session.state["step"],
        epoch=session.state["epoch"],
        loss_ema=session.state["loss_ema"],
        saved_step=session.state["step"],
    )
    with graceful() as wish:
        try:
            _train(session, cursor, progress, wish)
        except BaseException as error:
            _failed(session, cursor, error)
            raise
        finally:
            progress.stop()
        if cursor.step < session.planned_steps:
            return _interrupted(session, cursor, wish)
    session.run.finish("completed", "trained", f"stopped at step {cursor.step} as planned")
    return "completed"


def _train(session: Session, cursor: Cursor, progress: Progress, wish: Wish) -> None:
    if cursor.step == 0:
        session.run.probe(_probe(session, 0))
    progress.start("fit", session.planned_steps, cursor.step)
    accumulation = session.config.train.gradient_accumulation_steps
    for window in session.batches.windows(cursor.step + 1, session.planned_steps, accumulation):
        if wish:
            return
        line = _step(session, cursor, window)
        session.run.metrics(line)
        cursor.updating = False
        _heartbeat(session, cursor)
        progress.update(cursor.step, _live(line))
        if cursor.step in session.run.document["planned_checkpoints"]:
            _checkpoint(session, cursor, progress)


def _step(session: Session, cursor: Cursor, window: list[MicroBatch]) -> dict[str, Any]:
    """One optimizer update over all samples of `window`; returns its line of metrics.jsonl."""
    started = time.monotonic()
    device.reset_peak(session.device)
    losses, sigmas = _gradients(session, cursor.step + 1, window)
    loss = float(losses.mean())
    line = {
        "step": cursor.step + 1,
        "epoch": window[-1].epoch,
        "lr": session.trained.optimizer.param_groups[0]["lr"],
        "tokens": sum(
            len(batch.ids) * session.family.tokens(batch.target.shape, batch.conditioning) for batch in window
        ),
        "samples": [name for batch in window for name in batch.ids],
        "sigmas": sigmas,
        "dropped": [name for batch in window for name in batch.dropped],
        "bucket": window[0].bucket,
        "device": session.device.type,
    }
    norm, clipped = _clip(session)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        _refuse_non_finite(session, {**line, **_measured(session, started)}, loss, norm)
    if cursor.step == 0 and norm == 0.0:
        raise _no_gradient()
    cursor.updating = True
    session.trained.optimizer.step()
    session.trained.schedule.step()
    session.trained.optimizer.zero_grad(set_to_none=True)
    cursor.step, cursor.epoch = cursor.step + 1, window[-1].epoch
    cursor.loss_ema, smoothed = ema(cursor.loss_ema, loss)
    known = {"loss": loss, "loss_ema": smoothed, "grad_norm": norm, "clipped": clipped}
    return {**line, **known, **_measured(session, started)}


def _gradients(session: Session, step: int, window: list[MicroBatch]) -> tuple[Tensor, list[float]]:
    """Backward over the window; returns the loss and the sigma of each sample."""
    count = sum(len(batch.ids) for batch in window)
    losses: list[Tensor] = []
    sigmas: list[float] = []
    for batch in window:
        draw = session.objective.draw(batch, step, len(sigmas))
        seed = draws.seed_of("dropout", session.config.train.seed, step, len(sigmas))
        with device.seeded(seed):
            batch_losses = session.objective.losses(session.predict, batch.target, batch.conditioning, draw)
            if not batch_losses.requires_grad:
                raise _no_gradient()
            # The mean is over the samples of the step, however they fall into micro-batches.
            torch.autograd.backward(batch_losses.sum() / count)
        losses.append(batch_losses.detach())
        sigmas += draw.sigmas.tolist()
    return torch.cat(losses), sigmas


def _clip(session: Session) -> tuple[float, bool]:
    """The gradient's norm before clipping, and whether it was clipped."""
    limit = session.config.train.max_grad_norm or math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(session.trained.adapter.parameters(), limit))
    return norm, norm > limit


def _measured(session: Session, started: float) -> dict[str, Any]:
    used = device.memory(session.device)
    return {
        "step_s": time.monotonic() - started,
        "alloc_gib": used.alloc_gib,
        "reserved_gib": used.reserved_gib,
        "peak_gib": used.peak_gib,
        "rss_gib": used.rss_gib,
    }


def _refuse_non_finite(session: Session, line: dict[str, Any], loss: float, norm: float) -> NoReturn:
    """Record the step that never was, for a resume would meet it again, and stop before it does harm."""
    unknown = {"loss": None, "loss_ema": None, "grad_norm": None, "clipped": False}
    session.run.metrics({**line, **unknown})
    raise NonFiniteError(
        f"step {line['step']}: loss {loss}, gradient norm {norm}, samples {', '.join(line['samples'])}",
        remedy="set a lower optimizer.init_args.lr in config.yaml, or take these samples out; then finetune plan",
    )


def ema(state: list[float], loss: float, decay: float = 0.95) -> tuple[list[float], float]:
    """Bias-corrected moving average: (new state, its value). Uncorrected it would rise for 40 steps."""
    value, weight = state[0] * decay + loss * (1 - decay), state[1] * decay + (1 - decay)
    return [value, weight], value / weight


def _no_gradient() -> NoGradientError:
    return NoGradientError(
        "the first step gave the adapter no gradient: base and adapter are not connected",
        remedy="set model.lora.target_modules to linears that the prediction passes through, then finetune plan",
    )


def _checkpoint(session: Session, cursor: Cursor, progress: Progress) -> None:
    """A boundary: plain checkpoint, rolled -last-, probe, pruning."""
    run, step = session.run, cursor.step
    path = checkpoints.save_plain(run, session.trained, step=step, epoch=cursor.epoch)
    line = _probe(session, step)
    run.probe(line)
    best = run.document["best"]
    holdout = line["holdout_mean"]
    if holdout is not None and (best is None or holdout < best["holdout_loss"]):
        run.document["best"] = {"step": step, "checkpoint": path.name, "holdout_loss": holdout}
    _save_last(session, cursor)
    limit = session.config.train.checkpoints_total_limit
    checkpoints.prune(run, limit, run.document["best"]["checkpoint"] if run.document["best"] else None)
    progress.say(
        f"checkpoint {path.name}: probe {_number(line['train_mean'])} training, {_number(holdout)} held out"
    )


def _save_last(session: Session, cursor: Cursor) -> None:
    state = {
        "run_id": session.run.document["run_id"],
        "step": cursor.step,
        "epoch": cursor.epoch,
        "loss_ema": cursor.loss_ema,
        "fingerprint": session.fingerprint,
    }
    checkpoints.save_last(session.run, session.trained, state)
    cursor.saved_step = cursor.step
    session.run.write(done_steps=cursor.step)


def _probe(session: Session, step: int) -> dict[str, Any]:
    """Without dropout, whatever the fit uses; nothing of the run's randomness is touched."""
    session.denoiser.eval()
    try:
        return session.probe.measure(session.predict, step)
    finally:
        session.denoiser.train()


def _interrupted(session: Session, cursor: Cursor, wish: Wish) -> str:
    if cursor.saved_step < cursor.step:
        _save_last(session, cursor)
    reason = f"{wish.signal_name} after step {cursor.step} of {session.planned_steps}"
    session.run.write(done_steps=cursor.step)
    session.run.finish("interrupted", "stopped by the user", reason)
    return "interrupted"


def _failed(session: Session, cursor: Cursor, error: BaseException) -> None:
    """Keep what was learned where it is sound, and say in run.json what happened."""
    sound = not cursor.updating and not isinstance(error, NonFiniteError | NoGradientError)
    lines = traceback.format_exception_only(error)
    state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    try:
        if sound and cursor.saved_step < cursor.step:
            _save_last(session, cursor)
    finally:  # a disk that is full takes no checkpoint, but maybe these few bytes
        session.run.write(done_steps=cursor.step)
        session.run.finish(state, type(error).__name__, lines[-1].strip())


def _heartbeat(session: Session, cursor: Cursor) -> None:
    now = time.monotonic()
    if now - cursor.last_heartbeat >= HEARTBEAT_S:
        cursor.last_heartbeat = now
        session.run.write(done_steps=cursor.step)


def _live(line: dict[str, Any]) -> str:
    memory = line["alloc_gib"] or line["rss_gib"]
    return (
        f"loss {line['loss']:.4f} (smooth {line['loss_ema']:.4f})  lr {line['lr']:.2e}  "
        f"{line['step_s']:.2f} s/step  {memory:.1f} GiB"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
