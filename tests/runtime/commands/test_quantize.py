"""finetune quantize in a workspace, and what the later steps make of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from runtime import files, shards
from runtime.cache import encode
from runtime.commands.quantize import command
from runtime.config.resolve import resolve
from runtime.errors import CacheError, UserError
from runtime.quantize import made, nf4
from runtime.quantize.made import EVIDENCE
from runtime.training import session


def quantize(lab: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--workspace", str(lab.root), *arguments])


def choices(lab: Any, changes: dict[str, Any] | None = None) -> Any:
    return resolve(lab.workspace, lab.configure(changes).config)


@pytest.fixture
def done(lab: Any) -> Any:
    lab.configure()
    result = quantize(lab)
    assert result.exit_code == 0, result.output
    return lab


def own_base(lab: Any) -> Path:
    """A copy of the base that a test may change."""
    import shutil

    place = lab.root / "base"
    shutil.copytree(lab.workspace.externals()["model"], place)
    files.write_json(lab.workspace.local_path, {"external": {"model": str(place)}})
    return place


def test_evidence_and_output(lab: Any, conforms: Any) -> None:
    lab.configure()
    result = quantize(lab, "--json")
    document = json.loads(lab.workspace.evidence_path(EVIDENCE).read_text(encoding="utf-8"))
    conforms(document, "evidence")
    assert document["complete"] and document["data"] == json.loads(result.stdout)
    assert [item["name"] for item in document["data"]["components"]] == list(nf4.COMPONENTS)
    assert 0 < document["data"]["output_error"]["value"] < 0.5
    table = quantize(lab)
    assert "transformer" in table.stdout and "next: gate check 06" in table.stderr


def test_a_second_run_makes_nothing_anew(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = done.workspace.evidence(EVIDENCE)
    monkeypatch.setattr(shards, "read_tensor", lambda *given: pytest.fail("a tensor was read"))
    assert quantize(done).exit_code == 0
    after = done.workspace.evidence(EVIDENCE)
    assert after["components"] == before["components"] and after["output_error"] == before["output_error"]


def test_components_one_by_one(lab: Any) -> None:
    lab.configure()
    assert quantize(lab, "--component", "text_encoder").exit_code == 0
    data = lab.workspace.evidence(EVIDENCE)
    assert [item["name"] for item in data["components"]] == ["text_encoder"]
    assert data["output_error"] == {"value": None, "reason": "no denoiser was quantized"}
    assert quantize(lab, "--component", "transformer").exit_code == 0
    assert [item["name"] for item in lab.workspace.evidence(EVIDENCE)["components"]] == list(nf4.COMPONENTS)


def test_what_the_config_sets_to_none_is_left_out(lab: Any) -> None:
    lab.configure({"model.quantize_text_encoder": "none"})
    assert quantize(lab).exit_code == 0
    assert [item["name"] for item in lab.workspace.evidence(EVIDENCE)["components"]] == ["transformer"]
    lab.configure({"model.quantize_text_encoder": "none", "model.quantize": "none"})
    result = quantize(lab)
    assert result.exit_code == 1 and "next: gate skip 06 --reason" in result.stderr


def test_an_interruption_leaves_no_evidence_and_goes_on(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.configure()
    read = shards.read_tensor

    def dying(path: Path, entry: Any) -> torch.Tensor:
        if "text_encoder" in str(path):
            raise KeyboardInterrupt
        return read(path, entry)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "read_tensor", dying)
        assert quantize(lab).exit_code == 130
    assert lab.workspace.evidence(EVIDENCE) is None
    assert choices(lab).config.model.quantize == "none"
    weights = lab.root / "models/nf4/transformer/diffusion_pytorch_model.safetensors"
    time = weights.stat().st_mtime_ns
    assert quantize(lab).exit_code == 0 and weights.stat().st_mtime_ns == time


def test_a_full_disk_is_told_before(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    lab.configure()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    result = quantize(lab)
    assert result.exit_code == 1 and "free disk space" in result.stderr
    assert not [path for path in (lab.root / "models/nf4").rglob("*") if path.name != ".lock"]


def test_patterns_stay_until_they_are_forgotten(lab: Any) -> None:
    def kept(*arguments: str) -> list[str]:
        assert quantize(lab, "--component", "transformer", *arguments).exit_code == 0
        (item,) = lab.workspace.evidence(EVIDENCE)["components"]
        assert bool(item["kept"]) == bool(item["keep"])
        return list(item["keep"])

    lab.configure()
    assert kept() == []
    assert kept("--keep", "*.0.attn.to_q") == ["*.0.attn.to_q"]
    assert kept() == ["*.0.attn.to_q"]
    assert kept("--keep", "*.1.img_mod.1", "--keep", "*.to_k") == ["*.1.img_mod.1", "*.to_k"]
    assert kept("--keep", "none") == []


def test_a_layer_that_hurts_is_named_with_the_command_that_keeps_it(lab: Any) -> None:
    """One outlier in each block of 64 takes the scale: all the rest of the layer rounds to nothing."""
    base = own_base(lab)
    path = base / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = "transformer_blocks.1.attn.to_v"
    tensors[f"{name}.weight"].fill_(0.75)[:, ::64] = 20
    save_file(tensors, path, metadata={"format": "pt"})
    lab.configure()
    result = quantize(lab, "--component", "transformer")
    (item,) = lab.workspace.evidence(EVIDENCE)["components"]
    assert item["worst"][0]["name"] == name and item["worst"][0]["error"] > 0.2 > item["worst"][1]["error"]
    line = f'finetune quantize --component transformer --keep "{name}"'
    assert line in result.stdout
    assert quantize(lab, *line.replace('"', "").split()[2:]).exit_code == 0
    (item,) = lab.workspace.evidence(EVIDENCE)["components"]
    assert item["kept"] == [name] and item["worst"][0]["error"] < 0.2


# ---- what `auto` becomes


def test_auto_takes_what_was_made_and_says_so(done: Any) -> None:
    found = choices(done)
    assert (found.config.model.quantize, found.config.model.quantize_text_encoder) == ("nf4", "nf4")
    reason = found.choices["model.quantize"].reason
    assert reason == "auto: step 06 made models/nf4/transformer of this base"


def test_auto_without_step_06(lab: Any) -> None:
    found = choices(lab)
    assert (found.config.model.quantize, found.config.model.quantize_text_encoder) == ("none", "none")
    assert found.choices["model.quantize_text_encoder"].reason == "auto: step 06 made no NF4 text encoder"


def test_what_is_configured_wins(done: Any) -> None:
    found = choices(done, {"model.quantize": "none", "model.quantize_text_encoder": "none"})
    assert (found.config.model.quantize, found.config.model.quantize_text_encoder) == ("none", "none")
    assert found.choices["model.quantize"].reason == "as configured"


@pytest.mark.parametrize("component", nf4.COMPONENTS)
@pytest.mark.parametrize(
    ("fault", "reason"), [("base", "another base"), ("made", "has changed since"), ("gone", "is gone")]
)
def test_what_does_not_belong_to_the_base_is_not_used(
    lab: Any, component: str, fault: str, reason: str
) -> None:
    base = own_base(lab)
    lab.configure()
    quantize(lab)
    place = {"base": base / component, "made": lab.root / "models/nf4" / component}.get(fault)
    if place is not None:
        (place / "config.json").write_text((place / "config.json").read_text("utf-8") + " ", encoding="utf-8")
    else:
        import shutil

        shutil.rmtree(lab.root / "models/nf4" / component)
    key = {"transformer": "model.quantize", "text_encoder": "model.quantize_text_encoder"}[component]
    found = choices(lab)
    assert reason in found.choices[key].reason and found.choices[key].value == "none"
    assert not made.folders(lab.workspace, base, found.config).get(component)
    asked = choices(lab, {key: "nf4"}).config
    if component == "text_encoder":
        with pytest.raises(UserError, match=reason) as caught:
            made.folders(lab.workspace, base, asked)
        assert caught.value.remedy == "finetune quantize --component text_encoder"
    else:
        assert component not in made.folders(lab.workspace, base, asked)  # then it is quantized while loading


KEPT = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q"]


def plain_linears(denoiser: Any) -> list[str]:
    blocks = denoiser.transformer_blocks.named_modules(prefix="transformer_blocks")
    plain = [name.removesuffix(".base_layer") for name, module in blocks if type(module) is torch.nn.Linear]
    return [name for name in plain if ".lora_" not in name]


def test_what_is_kept_plain_is_so_in_a_fit_made_beforehand_or_while_loading(lab: Any) -> None:
    asks = {"model.quantize": "nf4", "model.quantize_text_encoder": "none", "model.nf4_keep": ["*.attn.to_q"]}
    online = [lab.launch(asks).denoiser, dict(lab.launch(asks).run.document["trainable"])]
    quantize(lab)
    (record,) = lab.workspace.evidence(EVIDENCE)["components"]
    assert (record["keep"], record["kept"]) == (["*.attn.to_q"], KEPT)
    session = lab.launch(asks)
    assert choices(lab, asks).choices["model.quantize"].value == "nf4"
    assert made.folders(lab.workspace, Path(lab.workspace.externals()["model"]), lab.configure(asks).config)
    assert [plain_linears(found) for found in (online[0], session.denoiser)] == [KEPT, KEPT]
    assert session.run.document["trainable"] == online[1]


def test_other_patterns_than_step_06_had_are_not_passed_over(lab: Any) -> None:
    asks = {"model.quantize_text_encoder": "none"}
    lab.configure(asks)
    quantize(lab, "--keep", "*.attn.to_q")
    assert choices(lab, asks).choices["model.quantize"].value == "nf4"  # nothing is asked for: as it was made
    other = choices(lab, {**asks, "model.nf4_keep": ["*.attn.to_k"]}).choices["model.quantize"]
    assert other.value == "none"
    assert "was made with --keep *.attn.to_q, not as model.nf4_keep says" in other.reason


# ---- the later steps


def test_the_cache_is_another_with_another_text_encoder(done: Any) -> None:
    job = done.job()
    encoder = job.common["encoders"]["text_encoder"]
    folder = done.root / "models/nf4/text_encoder"
    assert encoder == {
        "fingerprint": files.weights_fingerprint(folder), "dtype": "nf4", "compute_dtype": "fp32"
    }  # fmt: skip
    with pytest.raises(CacheError, match=r"encoders\.text_encoder\.dtype: fp32 in the cache, nf4 now"):
        done.launch()
    before = done.job({"model.quantize_text_encoder": "none"})
    old = before.store.read(before.wants[0].folder)["prompt_embeds"]
    assert done.cache().built == len(job.wants)
    new = job.store.read(job.wants[0].folder)["prompt_embeds"]
    assert 1e-4 < float((old.float() - new.float()).norm() / old.float().norm()) < 0.2


def test_the_text_encoder_is_packed_and_computes_as_asked(done: Any) -> None:
    job = done.job()
    encoders = encode.load(job.family, job.model, job.config, job.made)
    layer = encoders.pipeline.text_encoder.model.language_model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "Linear4bit" and layer.compute_dtype == torch.float32
    assert layer.weight.dtype == torch.uint8 and not layer.weight.requires_grad


def test_the_fit_loads_what_was_made_and_records_it(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done.cache()
    monkeypatch.setattr(nf4, "quantize", lambda *given, **named: pytest.fail("quantized while loading"))
    opened = done.launch()
    fingerprints = opened.run.document["model"]["fingerprints"]
    assert fingerprints == {
        "transformer": files.weights_fingerprint(Path(done.workspace.externals()["model"]) / "transformer"),
        "nf4/transformer": files.weights_fingerprint(done.root / "models/nf4/transformer"),
    }
    assert opened.run.document["choices"]["model.quantize"]["reason"].startswith("auto: step 06 made")


def test_the_fit_is_the_same_with_weights_quantized_while_loading(
    done: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.cache()
    changes = {"train.max_train_steps": 2, "train.checkpointing_steps": 2, "model.quantize": "nf4"}
    first = done.fit(changes)
    folders = made.folders
    monkeypatch.setattr(
        made, "folders", lambda *given: {k: v for k, v in folders(*given).items() if k != "transformer"}
    )
    second = done.fit(changes)
    assert list(second.document["model"]["fingerprints"]) == ["transformer"]
    one, two = done.adapter(first.path), done.adapter(second.path)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_session_still_starts_where_nothing_was_made(lab: Any) -> None:
    opened = session.launch(lab.workspace, lab.configure(), smoke=True, resume=None)
    assert list(opened.run.document["model"]["fingerprints"]) == ["transformer"]
