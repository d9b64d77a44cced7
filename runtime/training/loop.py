"""The fit: windows of micro-batches in, optimizer updates, records and checkpoints out."""

import contextlib
import math
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtime import device, files
from runtime.errors import DiskFullError, UserError
from runtime.progress import Progress
from runtime.training import checkpoints, compiling, draws, optimizers, stretches, trackers
from runtime.training.batches import MicroBatch
from runtime.training.gradients import DisconnectedError
from runtime.training.interruption import Wish, graceful
from runtime.training.session import Session
from runtime.training.stretches import Stretches
from runtime.training.trackers import Trackers

HEARTBEAT_S = 5.0


class NonFiniteError(UserError):
    """Loss or gradient was NaN or infinite for too many steps; the adapter is still that of the step before."""


class NoGradientError(UserError):
    """The first step gave the adapter no gradient at all: nothing would ever be learned."""


@dataclass(slots=True, kw_only=True)
class Cursor:
    """Where the run stands. `state` is what trainer_state.json keeps of it."""

    step: int
    epoch: int
    loss_ema: list[float]
    saved_step: int
    not_finite: list[str]
    """Of the steps in a row up to now that were left out: what was not finite, and of which samples."""
    proven: bool
    """A gradient has reached the adapter."""
    open_boundary: bool = False
    """The checkpoint of this step is due and not done: whatever broke it, a resume makes up for it."""
    updating: bool = False  # adapter, schedule, step and records don't agree at the moment
    last_heartbeat: float = field(default_factory=time.monotonic)
    stretches: Stretches = field(default_factory=Stretches)
    compiled: compiling.Made = lambda: 0


def fit(session: Session, progress: Progress) -> str:
    """Train to the planned step, or to a signal; returns the run's final state."""
    cursor = Cursor(
        step=session.state["step"],
        epoch=session.state["epoch"],
        loss_ema=session.state["loss_ema"],
        saved_step=session.state["step"],
        not_finite=session.state["not_finite"],
        proven=session.state["step"] > 0,
        open_boundary=session.state["open_boundary"],
    )
    with (
        compiling.bounded(session.config.train.compile is True) as compiled,
        graceful() as wish,
        trackers.opened(session.config, session.run.path, progress.say) as followed,
    ):
        try:
            cursor.compiled = compiled
            _train(session, cursor, progress, wish, followed)
        except BaseException as error:
            if not files.disk_full(error):
                _failed(session, cursor, error)
                raise
            full = _no_room(session, cursor)
            _failed(session, cursor, full)
            raise full from error
        finally:
            progress.stop()
        if cursor.step < session.planned_steps:
            return _interrupted(session, cursor, wish)
        session.run.finish("completed", "trained", f"stopped at step {cursor.step} as planned")
    return "completed"


def _train(session: Session, cursor: Cursor, progress: Progress, wish: Wish, followed: Trackers) -> None:
    if cursor.step == 0:
        _measure(session, 0, followed)
        _paint(session, cursor, progress, wish, followed)
    elif cursor.open_boundary or cursor.step == session.planned_steps:  # all trained, and no end recorded
        _checkpoint(session, cursor, progress, followed)
        _paint(session, cursor, progress, wish, followed)
    progress.start("fit", session.planned_steps, cursor.step)
    accumulation = session.config.train.gradient_accumulation_steps
    for window in session.batches.windows(cursor.step + 1, session.planned_steps, accumulation):
        if wish:
            return
        line = _step(session, cursor, window)
        session.run.metrics(line)
        cursor.updating = False
        followed.step(line)
        _watch(session, cursor, progress, line)
        _heartbeat(session, cursor)
        progress.update(cursor.step, _live(line))
        if cursor.step in session.run.document["planned_checkpoints"]:
            _checkpoint(session, cursor, progress, followed)
        elif cursor.step % (session.config.train.probe_steps or session.planned_steps) == 0:
            _measure(session, cursor.step, followed)
        _paint(session, cursor, progress, wish, followed)


def _watch(session: Session, cursor: Cursor, progress: Progress, line: dict[str, Any]) -> None:
    """Say when the machine slept or slowed down; run.json has it with whatever is written next."""
    alike = (line["bucket"], line["tokens"])
    for said in cursor.stretches.after(line["step"], line["step_s"], alike, stretches.read_clocks()):
        progress.say(f"note: {said}")
    session.run.document["stretches"] = cursor.stretches.to_json()
    _speed(session, cursor, progress)


def _speed(session: Session, cursor: Cursor, progress: Progress) -> None:
    """What makes steps faster, and why it does not where it was asked for: told when it begins."""
    compiled = cursor.compiled()
    faults = [fault for fault in (compiling.fault(compiled), session.gradients.fault) if fault]
    known = session.run.document.get("speed", {"fault": ""})["fault"]
    for fault in (fault for fault in faults if fault not in known):
        progress.say(f"note: slower than asked for: {fault}")
    session.run.document["speed"] = {
        "compiled": compiled,
        "recorded": session.gradients.recorded,
        "fault": "; ".join(faults),
    }


def _paint(session: Session, cursor: Cursor, progress: Progress, wish: Wish, followed: Trackers) -> None:
    """After the checkpoint of the same step: whatever painting breaks, nothing learned is lost."""
    if session.samples is not None and session.samples.due(cursor.step, session.planned_steps):
        with session.trained.offered():  # as it will be used: of an average, the average
            session.samples.paint(cursor.step, progress, lambda: bool(wish))
        for painted in session.run.document.get("samples", {"painted": []})["painted"][-1:]:
            if painted["step"] == cursor.step:
                followed.painted(painted)


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
        "tokens": sum(session.family.tokens(batch.target.shape, batch.conditioning) for batch in window),
        "samples": [name for batch in window for name in batch.ids],
        "sigmas": sigmas,
        "dropped": [name for batch in window for name in batch.dropped],
        "bucket": window[0].bucket,
        "device": session.device.type,
    }
    norm, clipped = _clip(session)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return _leave_out(session, cursor, {**line, **_measured(session, started)}, loss, norm)
    if not cursor.proven and not all(batch.regularisation for batch in window):
        if norm == 0.0:
            raise _no_gradient()
        cursor.proven = True
    cursor.updating, cursor.not_finite = True, []
    session.trained.optimizer.step()
    if session.trained.ema is not None:
        session.trained.ema.update()
    _advance(session, cursor, line)
    cursor.loss_ema, smoothed = ema(cursor.loss_ema, loss)
    known = {"loss": loss, "loss_ema": smoothed, "grad_norm": norm, "clipped": clipped}
    return {**line, **known, **_measured(session, started)}


def _advance(session: Session, cursor: Cursor, line: dict[str, Any]) -> None:
    session.trained.schedule.step()
    session.trained.optimizer.zero_grad(set_to_none=not session.gradients.keeps_gradients)
    cursor.step, cursor.epoch = line["step"], line["epoch"]


def _leave_out(
    session: Session, cursor: Cursor, line: dict[str, Any], loss: float, norm: float
) -> dict[str, Any]:
    """A step without its update: recorded, and the end of the run where it is one of too many in a row."""
    unknown = {"loss": None, "loss_ema": None, "grad_norm": None, "clipped": False, "skipped": True}
    samples = ", ".join(line["samples"])
    cursor.not_finite = [
        *cursor.not_finite,
        f"step {line['step']}: loss {loss}, gradient norm {norm}, samples {samples}",
    ]
    if len(cursor.not_finite) >= session.config.train.nonfinite_limit:
        session.run.metrics({**line, **unknown})
        raise NonFiniteError(
            "loss or gradient was not finite:\n  " + "\n  ".join(cursor.not_finite),
            remedy="set a lower optimizer.init_args.lr in config.yaml, or take these samples out; then finetune plan",
        )
    cursor.updating = True
    with warnings.catch_warnings():
        # Where the first update of all is left out, torch takes the schedule's step for one out of order.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        _advance(session, cursor, line)
    return {**line, **unknown}


def _gradients(session: Session, step: int, window: list[MicroBatch]) -> tuple[Tensor, list[float]]:
    """Backward over the window; returns the loss and the sigma of each sample."""
    count = sum(len(batch.ids) for batch in window)
    losses: list[Tensor] = []
    sigmas: list[float] = []
    for batch in window:
        draw = session.objective.draw(batch, step, len(sigmas))
        seed = draws.seed_of("dropout", session.config.train.seed, step, len(sigmas))
        with device.seeded(seed):
            try:
                losses.append(session.gradients(batch, draw, count))
            except DisconnectedError:
                raise _no_gradient() from None
        sigmas += draw.sigmas.tolist()
    return torch.cat(losses), sigmas


def _clip(session: Session) -> tuple[float, bool]:
    """The gradient's norm before clipping, and whether it was clipped."""
    train = session.config.train
    return optimizers.clip(session.trained.adapter.parameters(), train.max_grad_norm, train.clip_grad_value)


def _measured(session: Session, started: float) -> dict[str, Any]:
    used = device.memory(session.device)
    return {
        "step_s": time.monotonic() - started,
        "alloc_gib": used.alloc_gib,
        "reserved_gib": used.reserved_gib,
        "peak_gib": used.peak_gib,
        "rss_gib": used.rss_gib,
    }


def ema(state: list[float], loss: float, decay: float = 0.95) -> tuple[list[float], float]:
    """Bias-corrected moving average: (new state, its value). Uncorrected it would rise for 40 steps."""
    value, weight = state[0] * decay + loss * (1 - decay), state[1] * decay + (1 - decay)
    return [value, weight], value / weight


def _no_gradient() -> NoGradientError:
    return NoGradientError(
        "the first step gave the adapter no gradient: base and adapter are not connected",
        remedy="set model.lora.target_modules to linears that the prediction passes through, then finetune plan",
    )


def _checkpoint(session: Session, cursor: Cursor, progress: Progress, followed: Trackers) -> None:
    """A boundary: plain checkpoint, rolled -last-, probe, pruning."""
    run, step = session.run, cursor.step
    cursor.open_boundary = True
    path = checkpoints.save_plain(run, session.trained, step=step, epoch=cursor.epoch)
    line = _measure(session, step, followed)
    best = run.document["best"]
    holdout = line["holdout_mean"]
    if holdout is not None and (best is None or holdout < best["holdout_loss"]):
        run.document["best"] = {"step": step, "checkpoint": path.name, "holdout_loss": holdout}
    cursor.open_boundary = False
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
        "not_finite": cursor.not_finite,
        "open_boundary": cursor.open_boundary,
        "fingerprint": session.fingerprint,
    }
    checkpoints.save_last(session.run, session.trained, state)
    cursor.saved_step = cursor.step
    session.run.write(done_steps=cursor.step)


def _measure(session: Session, step: int, followed: Trackers) -> dict[str, Any]:
    line = _probe(session, step)
    session.run.probe(line)
    followed.probe(line)
    return line


def _probe(session: Session, step: int) -> dict[str, Any]:
    """Without dropout, whatever the fit uses; nothing of the run's randomness is touched."""
    session.denoiser.eval()
    try:
        with session.trained.offered():
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
    sound = not cursor.updating and not isinstance(error, NonFiniteError | NoGradientError | DiskFullError)
    lines = traceback.format_exception_only(error)
    state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    try:
        if sound and cursor.saved_step < cursor.step:
            _save_last(session, cursor)
    finally:
        # A disk that is full takes no checkpoint, but maybe these few bytes; if not, that it is full is told already.
        with contextlib.suppress(*((OSError,) if isinstance(error, DiskFullError) else ())):
            session.run.write(done_steps=cursor.step)
            session.run.finish(state, type(error).__name__, lines[-1].strip())


def _no_room(session: Session, cursor: Cursor) -> DiskFullError:
    run = session.run.path
    kept = checkpoints.lasts(run)
    resumable = kept or session.run.document["resumed_from"]
    whole = f"{run.name}/{kept[-1].name} is whole" if kept else f"{run.name} has no checkpoint to go on from"
    return DiskFullError(
        f"the disk is full: what step {cursor.step} left could not be written; {whole}",
        remedy=f"free some space, then finetune fit{' --resume latest' if resumable else ''}",
    )


def _heartbeat(session: Session, cursor: Cursor) -> None:
    now = time.monotonic()
    if now - cursor.last_heartbeat >= HEARTBEAT_S:
        cursor.last_heartbeat = now
        session.run.write(done_steps=cursor.step)


def _live(line: dict[str, Any]) -> str:
    memory = line["alloc_gib"] or line["rss_gib"]
    return (
        f"loss {_number(line['loss'])} (smooth {_number(line['loss_ema'])})  lr {line['lr']:.2e}  "
        f"{line['step_s']:.2f} s/step  {memory:.1f} GiB"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
