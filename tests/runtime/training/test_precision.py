"""Memory techniques and precisions: what they may change, and what they may not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import files
from runtime.progress import Progress
from runtime.training import loop

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "nf4": {"model.quantize": "nf4"},
    "dora": {"model.lora.use_dora": True},
    "dropout": {"model.lora.lora_dropout": 0.3},
    "every linear": {"model.lora.target_modules": "all-linear"},
}


# The text stream ends in the last block: its query and what follows attention there are read by nobody.
UNREAD = {
    f"transformer_blocks.1.{linear}"
    for linear in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
}


def gradients(lab: Any, changes: dict[str, Any]) -> dict[str, Tensor | None]:
    """Of the second step: after one update lora_B is not zero, so lora_A has a gradient too."""
    session = lab.launch(changes)
    for step, window in zip((1, 2), session.batches.windows(1, 2, 1), strict=True):
        session.trained.optimizer.zero_grad()
        loop._gradients(session, step, window)
        if step == 1:
            session.trained.optimizer.step()
    return {name: p.grad for name, p in session.trained.adapter.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_activations_changes_no_gradient(lab: Any, kind: str) -> None:
    """A technique that saves memory may overwrite what the backward pass still reads, and say nothing."""
    kept, recomputed = (
        gradients(lab, {**KINDS[kind], "train.gradient_checkpointing": on}) for on in (False, True)
    )
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        if name.partition(".lora_")[0] in UNREAD:
            assert all(one is None or not one.any() for one in (gradient, recomputed[name]))
        else:
            assert gradient is not None and gradient.any(), name
            assert torch.equal(gradient, recomputed[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_stays_as_it_was_while_every_lora_b_moves(lab: Any, kind: str) -> None:
    """No merge into packed or plain weights, and no adapter that is saved as it began."""
    session = lab.launch({**KINDS[kind], "train.max_train_steps": 1, "train.checkpointing_steps": 1})
    assert session.denoiser.is_gradient_checkpointing
    frozen = {name: p for name, p in session.denoiser.named_parameters() if not p.requires_grad}
    before = {name: p.detach().clone() for name, p in frozen.items()}
    loop.fit(session, Progress(quiet=True))
    assert len(frozen) > 20 and all(torch.equal(before[name], p) for name, p in frozen.items())
    saved = lab.adapter(session.run.path)
    still = {name.partition(".lora_")[0] for name, t in saved.items() if ".lora_B." in name and not t.any()}
    assert still == (UNREAD if kind == "every linear" else set())


@pytest.mark.parametrize(
    ("asked", "quantize", "base"),
    [
        ("no", "none", {torch.float32}),
        ("auto", "none", {torch.float32}),
        ("bf16", "none", {torch.bfloat16}),
        ("no", "nf4", {torch.float32, torch.uint8}),
        ("bf16", "nf4", {torch.bfloat16, torch.uint8}),
    ],
)
def test_precision_is_as_configured_and_recorded(
    lab: Any, asked: str, quantize: str, base: set[torch.dtype]
) -> None:
    changes = {"train.mixed_precision": asked, "model.quantize": quantize}
    lab.cache(changes)
    session = lab.launch(changes)
    adapter = session.trained.adapter.parameters()
    assert {p.dtype for p in session.denoiser.parameters() if not p.requires_grad} == base
    assert {p.dtype for p in adapter} == {torch.float32}
    resolved = files.read_json(session.run.path / "run.json")["resolved"]
    recorded = resolved["train"]["mixed_precision"], resolved["model"]["quantize"]
    assert recorded == ("no" if asked == "auto" else asked, quantize)
    blocks: list[torch.dtype] = []
    session.denoiser.transformer_blocks[0].attn.register_forward_pre_hook(
        lambda module, given, named: blocks.append(named["hidden_states"].dtype), with_kwargs=True
    )
    loop.fit(session, Progress(quiet=True))
    assert set(blocks) == base - {torch.uint8}
    state = [t for kept in session.trained.optimizer.state.values() for t in kept.values()]
    assert {tensor.dtype for tensor in state} == {torch.float32}


@pytest.mark.parametrize(
    ("optimizer", "each"), [("torch.optim.AdamW", 16), ("bitsandbytes.optim.AdamW8bit", 10)]
)
def test_a_rank_costs_its_weights_gradients_and_states(lab: Any, optimizer: str, each: int) -> None:
    """Bytes for each further parameter: fp32 weight and gradient, and two states of four bytes or of one."""
    small, large = (kept_bytes(lab, {"optimizer.class_path": optimizer, "model.lora.r": r}) for r in (32, 64))
    more, parameters = (large[i] - small[i] for i in (0, 1))
    assert parameters > 10_000
    assert more / parameters == pytest.approx(each, rel=0.01)


def kept_bytes(lab: Any, changes: dict[str, Any]) -> tuple[int, int]:
    """Bytes of adapter, gradients and optimizer after a step; parameters of the adapter."""
    session = lab.launch(changes)
    (window,) = session.batches.windows(1, 1, 1)
    loop._gradients(session, 1, window)
    session.trained.optimizer.step()
    adapter = session.trained.adapter.parameters()
    tensors = [*adapter, *(p.grad for p in adapter)]
    for kept in session.trained.optimizer.state.values():
        tensors += [
            t for name, t in kept.items() if torch.is_tensor(t) and "qmap" not in name and t.numel() > 1
        ]
    return sum(t.numel() * t.element_size() for t in tensors), sum(p.numel() for p in adapter)


def test_nothing_in_the_worker_merges_an_adapter_into_a_base() -> None:
    """Where the base is packed or in fp8 a merge rounds twice; here the adapter stays beside it."""
    calls = ("merge_and_unload", "merge_adapter", "fuse_lora", ".merge(")
    root = Path(loop.__file__).parents[1]
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    assert [path.name for path, text in texts.items() if any(call in text for call in calls)] == []
