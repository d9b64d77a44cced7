"""Runs that start from an adapter, or on other weights of the denoiser: recorded, resumed, refused."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from runtime import files
from runtime.commands import quantize
from runtime.config.resolve import resolve
from runtime.errors import ResumeError, UserError
from runtime.families import weights
from runtime.quantize import made
from runtime.training import adapter_file, checkpoints, loop, trainables
from runtime.training.prepared import OWN_NF4

SHORT = {"train.max_train_steps": 4, "train.checkpointing_steps": 2}
BLOCK = "transformer_blocks.0.attn.to_q.weight"


@pytest.fixture
def earlier(lab: Any) -> Any:
    """The lab after a run whose adapter lies at start.safetensors, in kohya's naming."""
    from runtime.commands.export import write

    run = lab.fit({**SHORT, "model.lora.lora_alpha": 2, "logging.tracker_project_name": "earlier"})
    write(checkpoints.lasts(run.path)[-1] / trainables.WEIGHTS, lab.root / "start.safetensors", "kohya")
    return lab


START = {**SHORT, "model.lora.pretrained_weight": "start.safetensors", "model.lora.r": 8}


def interrupted(lab: Any, changes: dict[str, Any], at: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        original = loop._step

        def step(session: Any, cursor: Any, window: Any) -> Any:
            if cursor.step == at:
                raise RuntimeError("stopped")
            return original(session, cursor, window)

        patch.setattr(loop, "_step", step)
        with pytest.raises(RuntimeError, match="stopped"):
            lab.fit(changes)


def test_a_run_starts_from_an_adapter(earlier: Any, conforms: Any) -> None:
    session = earlier.launch(START)
    file = adapter_file.read_adapter(
        earlier.root / "start.safetensors", adapter_file.linears(session.denoiser)
    )
    for module, factors in file.modules.items():
        layer = session.denoiser.get_submodule(module)
        found = layer.scaling["default"] * (
            layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        )
        torch.testing.assert_close(found, factors.delta(), rtol=1e-6, atol=1e-9)
        assert found.abs().max() > 0
    document = session.run.document
    conforms(document, "run")
    assert document["trainable"]["pretrained"] == {
        "sha256": files.file_digest(earlier.root / "start.safetensors"), "modules": 8, "fresh_modules": 0
    }  # fmt: skip
    assert session.state["step"] == 0 and not session.trained.optimizer.state


def test_without_one_the_record_says_nothing(lab: Any) -> None:
    assert "pretrained" not in lab.launch(SHORT).run.document["trainable"]


def test_a_resume_goes_on_from_the_checkpoint_not_from_the_file(earlier: Any) -> None:
    whole = earlier.adapter(earlier.fit({**START, "logging.tracker_project_name": "whole"}).path)
    interrupted(earlier, START, at=3)
    resumed = earlier.fit(START, resume="latest")
    assert resumed.document["resumed_from"]["step"] == 3
    assert "pretrained" in resumed.document["trainable"]
    found = earlier.adapter(resumed.path)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_resume_refuses_another_file_but_not_another_place(earlier: Any) -> None:
    interrupted(earlier, START, at=3)
    start = earlier.root / "start.safetensors"
    shutil.copyfile(start, earlier.root / "moved.safetensors")
    moved = {**START, "model.lora.pretrained_weight": "moved.safetensors"}
    earlier.launch(moved, resume="latest")
    save_file({name: tensor + 1 for name, tensor in load_file(start).items()}, start)
    with pytest.raises(ResumeError, match=r"model\.lora\.pretrained_weight: \w{64} then, \w{64} now$"):
        earlier.launch(START, resume="latest")


# ---- other weights of the denoiser


@pytest.fixture
def other(lab: Any, nano: Path) -> Any:
    """The lab with another denoiser at dit.safetensors, as ComfyUI names one."""
    tensors = load_file(nano / "transformer" / "diffusion_pytorch_model.safetensors")
    write_dit(lab, {name: tensor * 2 if name == BLOCK else tensor for name, tensor in tensors.items()})
    return lab


def write_dit(lab: Any, tensors: dict[str, torch.Tensor]) -> None:
    save_file({f"diffusion_model.{n}": t.clone() for n, t in tensors.items()}, lab.root / "dit.safetensors")


OTHER = {**SHORT, "model.transformer_weight": "dit.safetensors"}


@pytest.mark.parametrize("precision", ["none", "nf4"])
def test_a_run_on_other_weights(other: Any, nano: Path, conforms: Any, precision: str) -> None:
    changes = {**OTHER, "model.quantize": precision}
    session = other.launch(changes)
    conforms(session.run.document, "run")
    assert session.run.document["model"]["fingerprints"] == {
        "transformer": files.weights_fingerprint(nano / "transformer"),
        "transformer_weight": weights.open_denoiser_weights(other.root / "dit.safetensors").fingerprint(),
    }
    layer = session.denoiser.transformer_blocks[0].attn.to_q
    own = other.launch({**changes, "model.transformer_weight": None}).denoiser.transformer_blocks[0].attn.to_q
    question = torch.ones(1, 128)
    bias = own.base_layer.bias
    torch.testing.assert_close(
        layer.base_layer(question) - bias, 2 * (own.base_layer(question) - bias), rtol=1e-4, atol=1e-5
    )


def test_a_resume_refuses_other_weights(other: Any) -> None:
    interrupted(other, OTHER, at=3)
    other.launch(OTHER, resume="latest")
    with pytest.raises(ResumeError, match=r"model\.transformer_weight: \w{64} then, None now$"):
        other.launch({**OTHER, "model.transformer_weight": None}, resume="latest")
    write_dit(
        other,
        {
            name.removeprefix("diffusion_model."): tensor * 2
            for name, tensor in load_file(other.root / "dit.safetensors").items()
        },
    )
    with pytest.raises(ResumeError, match=r"model\.transformer_weight: \w{64} then, \w{64} now$"):
        other.launch(OTHER, resume="latest")


def test_what_is_no_denoiser_is_refused_before_anything_is_loaded(
    lab: Any, nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.families.qwen_image_edit import QwenImageEdit

    monkeypatch.setattr(QwenImageEdit, "load_denoiser", lambda *given, **named: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"is a text encoder, expected a Qwen-Image DiT$"):
        lab.launch({**OTHER, "model.transformer_weight": str(nano / "text_encoder")})
    with pytest.raises(UserError, match="given as an adapter, is not there"):
        lab.launch(START)


def test_step_06_leaves_other_weights_out_and_what_it_made_is_not_taken(other: Any) -> None:
    other.configure({"model.quantize_text_encoder": "none"})
    made_by = CliRunner().invoke(quantize.command, ["--workspace", str(other.root)])
    assert made_by.exit_code == 0, made_by.output
    model = Path(other.workspace.externals()["model"])
    for changes, taken in (({}, True), (OTHER, False)):
        resolved = resolve(other.workspace, other.configure({**SHORT, **changes}).config)
        assert (resolved.config.model.quantize == "nf4") is taken
        reason = resolved.choices["model.quantize"].reason
        assert ("not of model.transformer_weight and is not used" in reason) is not taken
        nf4 = {**SHORT, **changes, "model.quantize": "nf4"}
        folders = made.folders(other.workspace, model, other.configure(nf4).config)
        assert ("transformer" in folders) is taken
        assert folders.get("transformer_weight") == (None if taken else other.root / "dit.safetensors")
    config = other.configure({**OTHER, "model.quantize_text_encoder": "nf4"}).config
    assert quantize.wanted(config) == ("text_encoder",)
    with pytest.raises(UserError, match=r"replaces the denoiser \(model\.transformer_weight\)"):
        quantize.wanted(other.configure({**OTHER, "model.quantize_text_encoder": "none"}).config)


# ---- other NF4 weights of the same denoiser


NF4 = {**SHORT, "model.quantize": "nf4"}
FIRST, SECOND, NOTHING = (("--keep", pattern) for pattern in ("*.0.attn.*", "*.1.attn.*", "none"))
MADE = ("--made", "foreign")


def pack(lab: Any, arguments: tuple[str, ...] | None) -> None:
    """models/nf4 anew; nothing where a fit is to quantize while loading."""
    folder = lab.root / "models" / "nf4"
    if arguments == MADE:
        folder.rename(lab.root / "foreign")
        arguments = ("--made", str(lab.root / "foreign"))
    shutil.rmtree(folder, ignore_errors=True)
    if arguments is None:
        lab.workspace.evidence_path(made.EVIDENCE).unlink(missing_ok=True)
        return
    line = ["--workspace", str(lab.root), "--component", "transformer", "--device", "cpu", *arguments]
    done = CliRunner().invoke(quantize.command, line)
    assert done.exit_code == 0, done.output


def without_nf4(read: Any, path: Path) -> dict[str, Any]:
    """The state as an earlier version wrote it."""
    state: dict[str, Any] = read(path)
    del state["fingerprint"][OWN_NF4]
    return state


@pytest.mark.parametrize(
    ("then", "later"),
    [
        (
            FIRST,
            [
                (SECOND, r"\w{64} then, \w{64} now"),
                (NOTHING, r"\w{64} then, None now"),
                (None, r"\w{64} then, None now"),
                (FIRST, None),
            ],
        ),
        (
            NOTHING,
            [
                (MADE, r"(None|\w{64}) then, \w{64} now"),
                (SECOND, r"(None|\w{64}) then, \w{64} now"),
                (NOTHING, None),
            ],
        ),
        (None, [(FIRST, r"None then, \w{64} now"), (NOTHING, None)]),
    ],
)
def test_a_resume_refuses_other_nf4_weights(
    lab: Any, monkeypatch: pytest.MonkeyPatch, then: Any, later: list[tuple[Any, str | None]]
) -> None:
    """What step 06 was told to keep is in no key; a checkpoint of before that was looked at has the run's record."""
    pack(lab, then)
    interrupted(lab, NF4, at=3)
    read = checkpoints.read_state
    for now, told in later:
        pack(lab, now)
        for state in (read, functools.partial(without_nf4, read)):
            monkeypatch.setattr(checkpoints, "read_state", state)
            if told is None:
                assert lab.launch(NF4, resume="latest").state["step"] == 3
            else:
                with pytest.raises(ResumeError, match=f"--keep or --made: {told}$"):
                    lab.launch(NF4, resume="latest")


def test_validation_paints_with_the_same_weights(other: Any, nano: Path) -> None:
    """The painter takes what the session took: base pictures of other weights are other pictures."""
    from runtime.families.registry import load_family
    from runtime.inference.painter import Painter

    config = resolve(other.workspace, other.configure(OTHER).config).config
    taken = made.folders(other.workspace, nano, config)
    painter = Painter(load_family(nano), nano, config, None, taken)
    own = load_file(nano / "transformer" / "diffusion_pytorch_model.safetensors")[BLOCK]
    found = painter.predict.denoiser.state_dict()[BLOCK]
    assert torch.equal(found, own * 2)
