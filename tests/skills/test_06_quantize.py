"""Gate 06: healthy NF4 and a rightful skip pass, and each planted fault turns its check and no other."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Spoil = Callable[[Any], Any]
EVIDENCE = "06-quantize"
WEIGHT = "transformer_blocks.0.attn.to_q.weight"
FILES = {"transformer": "diffusion_pytorch_model.safetensors", "text_encoder": "model.safetensors"}


def _weights(made: Any, component: str = "transformer") -> Path:
    return made.root / "models/nf4" / component / FILES[component]  # type: ignore[no-any-return]


def _component(change: Callable[[dict[str, Any]], Any], component: str = "transformer") -> Spoil:
    def spoil(document: dict[str, Any]) -> None:
        change(next(item for item in document["data"]["components"] if item["name"] == component))

    return lambda made: made.edit(made.evidence(EVIDENCE), spoil)


def _tensors(change: Callable[[dict[str, Any]], Any], component: str = "transformer") -> Spoil:
    """Weights changed, and recorded as if step 06 had made them so."""

    def spoil(made: Any) -> None:
        path = _weights(made, component)
        tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)
        _record(made, component)

    return spoil


def _config(change: Callable[[dict[str, Any]], Any], component: str = "transformer") -> Spoil:
    def spoil(made: Any) -> None:
        made.edit(f"models/nf4/{component}/config.json", change)
        _record(made, component)

    return spoil


def _record(made: Any, component: str) -> None:
    """The evidence's digests and sizes are those of the folder as it lies there."""
    nf4, tensors = sys.modules["synthetic_nf4"], sys.modules["gates.tensors"]
    folder = made.root / "models/nf4" / component
    now = nf4.record(made.root, component)
    size = sum(entry.size for entry in tensors.read_header(folder / FILES[component], "x").values())

    def change(record: dict[str, Any]) -> None:
        record.update(files=now["files"], made_fingerprint=now["made_fingerprint"], made_gib=size / 2**30)

    _component(change, component)(made)


def _garble(tensors: dict[str, Any], name: str = WEIGHT) -> None:
    tensors[f"{name}.absmax"] = tensors[f"{name}.absmax"][::-1] // 2


def _bytes(made: Any) -> None:
    path = _weights(made)
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)


def _pop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


def _state(**values: Any) -> Callable[[dict[str, Any]], Any]:
    def change(tensors: dict[str, Any]) -> None:
        name = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
        state = {**json.loads(tensors[name].tobytes()), **values}
        tensors[name] = np.frombuffer(json.dumps(state).encode(), np.uint8)

    return change


def _plain(tensors: dict[str, Any], weight: str = WEIGHT) -> None:
    """One linear as the base has it."""
    for name in [name for name in tensors if name.startswith(weight)]:
        del tensors[name]
    tensors[weight] = sys.modules["synthetic_nf4"].weights("transformer")[weight]


def _kept(made: Any) -> None:
    """Two of four linears, as `--keep` would leave them."""
    names = [f"transformer_blocks.{block}.attn.to_q" for block in (0, 1)]
    _tensors(lambda tensors: [_plain(tensors, f"{name}.weight") for name in names])(made)
    _component(lambda record: record.update(kept=names, linears=2))(made)
    _config(lambda d: d["quantization_config"]["llm_int8_skip_modules"].extend(names))(made)


def _source(made: Any) -> None:
    path = made.root / "models/base/transformer/config.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")


def _data(**values: Any) -> Spoil:
    return lambda made: made.edit(made.evidence(EVIDENCE), lambda d: d["data"].update(values))


FAULTS: dict[str, tuple[Spoil, set[str], set[str]]] = {
    "nothing was made": (lambda m: m.evidence(EVIDENCE).unlink(), {"components-present"}, set()),
    "begun and not finished": (
        lambda m: m.edit(m.evidence(EVIDENCE), lambda d: d.update(complete=False, data={})),
        {"components-present"},
        set(),
    ),
    "evidence that is none": (
        lambda m: m.edit(m.evidence(EVIDENCE), lambda d: d["data"].pop("components") and None),
        set(),
        {"components-present"},
    ),
    "one of two was made": (
        lambda m: m.edit(m.evidence(EVIDENCE), lambda d: d["data"]["components"].pop() and None),
        {"components-present"},
        set(),
    ),
    "a folder is gone": (
        lambda m: shutil.rmtree(m.root / "models/nf4/text_encoder"),
        {"components-present"},
        set(),
    ),
    "a shard is gone": (lambda m: _weights(m).unlink(), {"components-present"}, set()),
    "both are none in the config": (
        lambda m: m.edit_config(lambda c: c["model"].update(quantize="none", quantize_text_encoder="none")),
        {"components-present"},
        set(),
    ),
    "one byte edited": (_bytes, {"quantization-recorded"}, set()),
    "a file more": (
        lambda m: (_weights(m).parent / "extra.bin").write_bytes(b"x"),
        {"quantization-recorded"},
        set(),
    ),
    "a file cut short": (
        lambda m: _weights(m).write_bytes(_weights(m).read_bytes()[:-9]),
        set(),
        {"quantization-recorded", "error-bounded"},
    ),
    "an edited fingerprint": (
        _component(lambda record: record.update(made_fingerprint="0" * 64)),
        {"quantization-recorded"},
        set(),
    ),
    "no quantization_config": (
        _config(lambda d: d.pop("quantization_config") and None),
        {"quantization-recorded"},
        set(),
    ),
    "fp4 in the config": (
        _config(lambda d: d["quantization_config"].update(bnb_4bit_quant_type="fp4")),
        {"quantization-recorded"},
        set(),
    ),
    "single quantization in the config": (
        _config(lambda d: d["quantization_config"].update(bnb_4bit_use_double_quant=False)),
        {"quantization-recorded"},
        set(),
    ),
    "a kept linear that the loader would replace": (
        _config(lambda d: d["quantization_config"].update(llm_int8_skip_modules=["lm_head"]), "text_encoder"),
        {"quantization-recorded"},
        set(),
    ),
    "a weight without its scales": (
        _tensors(_pop(f"{WEIGHT}.absmax")), {"quantization-recorded"}, {"error-bounded"}
    ),
    "scales that were not quantized again": (
        _tensors(lambda t: t.update({f"{WEIGHT}.absmax": np.ones(64, np.float32)})),
        {"quantization-recorded"},
        {"error-bounded"},
    ),
    "a weight of another type": (_tensors(_state(quant_type="fp4")), {"quantization-recorded"}, set()),
    "a weight of another shape": (_tensors(_state(shape=[32, 128])), {"quantization-recorded"}, {"error-bounded"}),
    "a state without a shape": (_tensors(_state(shape="x")), set(), {"quantization-recorded", "error-bounded"}),
    "a linear left plain": (_tensors(_plain), {"quantization-recorded"}, set()),
    "a tensor of the base is missing": (_tensors(_pop("proj_out.weight")), {"quantization-recorded"}, set()),
    "a tensor of nobody": (
        _tensors(lambda t: t.update(stranger=np.ones(3, np.float32))), {"quantization-recorded"}, set()
    ),
    "another number of linears": (
        _component(lambda record: record.update(linears=5)), {"quantization-recorded"}, set()
    ),
    "a size that is not true": (_component(lambda record: record.update(made_gib=0.1)), {"size-ratio"}, set()),
    "half of it kept": (_kept, {"size-ratio"}, set()),
    "a bad mean": (_component(lambda record: record.update(mean_error=0.13)), {"error-bounded"}, set()),
    "a bad layer, as recorded": (
        _component(lambda record: record["worst"].insert(0, {"name": "x", "error": 0.25}), "text_encoder"),
        {"error-bounded"},
        set(),
    ),
    "garbled scales": (_tensors(_garble), {"error-bounded"}, set()),
    "a NaN among the scales": (
        _tensors(lambda t: t[f"{WEIGHT}.nested_absmax"].__setitem__(0, np.nan)), {"error-bounded"}, set()
    ),
    "a better error than is true": (
        _component(lambda record: [item.update(error=0.05) for item in record["worst"]]),
        {"error-bounded"},
        set(),
    ),
    "an output far off": (_data(output_error={"value": 0.7, "reason": "x"}), {"error-bounded"}, set()),
    "the base changed since": (_source, {"source-untouched"}, set()),
    "the base changed meanwhile": (
        _component(lambda record: record.update(source_fingerprint_after="0" * 64)),
        {"source-untouched"},
        set(),
    ),
    "made of another model": (_data(model="models/other"), {"source-untouched"}, set()),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_its_check(fault: str, made: Any, judge: Any, assert_turned: Any) -> None:
    spoil, fails, errors = FAULTS[fault]
    spoil(made)
    assert_turned(judge(made, "06"), fail=fails, error=errors)


def test_healthy(made: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(made, "06")
    assert (verdict.verdict, verdict.outcome, verdict.skip_reason) == ("PASS", "passed", None)
    assert verdict.counts["pass"] == 5 and verdict.next_command == "finetune cache"
    assert_turned(verdict)


@pytest.mark.parametrize("quantize", ["quantize", "quantize_text_encoder"])
def test_a_component_that_the_config_does_not_want_may_be_absent(
    quantize: str, made: Any, judge: Any
) -> None:
    name = {"quantize": "transformer", "quantize_text_encoder": "text_encoder"}[quantize]
    made.edit_config(lambda c: c["model"].update({quantize: "none"}))
    made.edit(
        made.evidence(EVIDENCE),
        lambda d: d["data"].update(components=[c for c in d["data"]["components"] if c["name"] != name]),
    )
    shutil.rmtree(made.root / "models/nf4" / name)
    assert judge(made, "06").outcome == "passed"


def test_without_the_base_it_is_judged_by_what_was_recorded(made: Any, judge: Any) -> None:
    shutil.rmtree(made.root / "models/base")
    verdict = judge(made, "06")
    assert verdict.passes
    told = {check.id: check.message for check in verdict.checks}
    assert "of the base is not here" in told["source-untouched"]
    assert "0 layers measured anew" in told["error-bounded"]


def test_a_planted_bad_layer_is_named(made: Any, judge: Any) -> None:
    _tensors(_garble)(made)
    check = next(c for c in judge(made, "06").checks if c.id == "error-bounded")
    assert "transformer_blocks.0.attn.to_q" in check.message and "measured anew" in check.message


def test_a_large_file_is_known_by_its_samples(made: Any, judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gates import evidence, quantized

    for module in (evidence, quantized):
        monkeypatch.setattr(module, "SAMPLED_ABOVE", 100)
    monkeypatch.setattr(evidence, "PIECE", 64)
    nf4 = sys.modules["synthetic_nf4"]
    for component in FILES:
        now = nf4.record(made.root, component)
        prints = {name: now[name] for name in now if "fingerprint" in name}
        _component(lambda item, prints=prints: item.update(prints), component)(made)  # type: ignore[misc]
    assert judge(made, "06").passes
    path = _weights(made)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 10] ^= 1
    path.write_bytes(content)
    failed = [check.id for check in judge(made, "06").checks if check.status == "fail"]
    assert failed == ["quantization-recorded"]


# ---- the skip


def _skip(reason: str = "64 GiB are enough") -> Spoil:
    def spoil(made: Any) -> None:
        document = {"schema": "skip/1", "gate": "06", "reason": reason, "at": "2026-11-30T12:00:00.000Z"}
        path = made.root / ".gates/skips/06.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document), encoding="utf-8")

    return spoil


@pytest.fixture
def skipped(made: Any) -> Any:
    made.evidence(EVIDENCE).unlink()
    shutil.rmtree(made.root / "models/nf4")
    _skip()(made)
    return made


def test_a_skip_with_a_reason_and_a_plan_that_fits(skipped: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(skipped, "06")
    assert (verdict.verdict, verdict.outcome, verdict.exit_code) == ("PASS", "skipped", 0)
    assert verdict.skip_reason == verdict.summary == "64 GiB are enough"
    assert_turned(verdict)


def test_unfinished_weights_do_not_stand_in_the_way_of_a_skip(made: Any, judge: Any) -> None:
    made.edit(made.evidence(EVIDENCE), lambda d: d.update(complete=False, data={}))
    _skip()(made)
    assert judge(made, "06").outcome == "skipped"


def test_what_was_finished_is_judged_whatever_a_skip_says(made: Any, judge: Any) -> None:
    _skip()(made)
    assert judge(made, "06").outcome == "passed"
    _bytes(made)
    assert judge(made, "06").outcome == "failed"


def _plan(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit(made.evidence("04-plan"), lambda d: change(d["data"]))


SKIP_FAULTS: dict[str, tuple[Spoil, set[str], set[str], str]] = {
    "no reason": (
        lambda m: m.edit(".gates/skips/06.json", lambda d: d.update(reason=" ")),
        {"skip-justified"}, set(), "gate skip 06 --reason TEXT",
    ),
    "no plan": (lambda m: m.evidence("04-plan").unlink(), {"skip-justified"}, set(), "finetune plan"),
    "a plan of another config": (
        _plan(lambda d: d.update(config_digest="0" * 64)), {"skip-justified"}, set(), "finetune plan"
    ),
    "a fit that is too large": (
        _plan(lambda d: d["phases"]["fit"].update(peak_gib=8.5)), {"skip-justified"}, set(), "finetune quantize"
    ),
    "a cache phase that is too large": (
        _plan(lambda d: d["phases"]["cache"].update(peak_gib=8.5)), {"skip-justified"}, set(), "finetune quantize"
    ),
    "a plan that counts on an NF4 text encoder": (
        _plan(lambda d: d["choices"].update({"model.quantize_text_encoder": {"value": "nf4", "reason": "x"}})),
        {"skip-justified"}, set(), "finetune quantize",
    ),
    "a file of another gate": (
        lambda m: m.edit(".gates/skips/06.json", lambda d: d.update(gate="07")), set(), {"skip-justified"},
        "finetune quantize",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SKIP_FAULTS)
def test_an_unjustified_skip_fails(fault: str, skipped: Any, judge: Any, assert_turned: Any) -> None:
    spoil, fails, errors, remedy = SKIP_FAULTS[fault]
    spoil(skipped)
    verdict = judge(skipped, "06")
    assert_turned(verdict, fail=fails, error=errors)
    assert verdict.skip_reason is None and verdict.next_command == remedy


def test_gate_07_passes_after_a_skip_as_after_the_step(skipped: Any) -> None:
    from gates import chain
    from gates.workspace import Workspace

    whole = [judged.whole for judged in chain.judge_up_to(Workspace.open(skipped.root), "07")]
    assert all(verdict.passes for verdict in whole), [(v.gate, v.summary) for v in whole]
    assert {v.gate: v.outcome for v in whole}["06"] == "skipped"


def test_gate_07_knows_the_weights_that_a_run_loaded(made: Any, judge: Any) -> None:
    from gates.evidence import weights_fingerprint

    folder = made.root / "models/nf4/transformer"
    for kind in ("smoke", "full"):
        made.edit(
            made.run(kind) / "run.json",
            lambda d: d["model"]["fingerprints"].update({"nf4/transformer": weights_fingerprint(folder)}),
        )
    assert judge(made, "07").passes
    (folder / "extra.txt").write_text("x", encoding="utf-8")
    verdict = judge(made, "07")
    check = next(c for c in verdict.checks if c.id == "run-matches-inputs" and c.status == "fail")
    assert "another base nf4/transformer than now" in check.message


# ---- the command


def test_gate_skip_writes_what_the_gate_reads(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from gates import cli

    made.evidence(EVIDENCE).unlink()
    where = ["--workspace", str(made.root)]
    assert cli.main(["skip", "6", "--reason", " it fits ", *where]) == 0
    assert "gate 06 is to be skipped: it fits" in capsys.readouterr().out
    assert cli.main(["check", "06", *where]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == "gate 06: PASS (skipped), it fits; next: finetune cache"
    )


@pytest.mark.parametrize(
    "arguments", [["07", "--reason", "x"], ["all", "--reason", "x"], ["06"], ["06", "--reason", " "]]
)
def test_gate_skip_takes_only_06_and_only_with_a_reason(arguments: list[str], made: Any) -> None:
    from gates import cli

    assert cli.main(["skip", *arguments, "--workspace", str(made.root)]) == 2
    assert not (made.root / ".gates/skips").exists()


# ---- what the runtime makes


def test_what_finetune_quantize_makes_passes_and_the_script_stops_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate's own reading of NF4 against bitsandbytes' writing of it."""
    pytest.importorskip("bitsandbytes")
    from gates import chain, packaged, registry
    from gates.workspace import Workspace
    from runtime.cli import main as finetune
    from runtime.demo import series

    root = tmp_path / "ws"
    series.prepare(root, "cpu")
    assert [finetune([name, "--workspace", str(root)]) for name in ("dataset", "plan")] == [0, 0]
    script = series.load_script(packaged.data_dir("skills") / registry.skill_of("06") / "scripts" / "run.py")
    monkeypatch.setattr(script, "gate", _only_06(root))
    assert script.main(["--workspace", str(root)]) == 0
    verdict = chain.judge(registry.load("06"), Workspace.open(root)).whole
    assert verdict.outcome == "passed"
    told = next(check.message for check in verdict.checks if check.id == "error-bounded")
    assert told == "88 layers measured anew"
    monkeypatch.setattr(script, "finetune", lambda line: pytest.fail("it passed already"))
    assert script.main(["--workspace", str(root)]) == 0


def _only_06(root: Path) -> Callable[..., int]:
    """Without the gates before it, which want a host and an environment."""
    from gates import chain, registry
    from gates.workspace import Workspace

    return lambda line: chain.judge(registry.load("06"), Workspace.open(root)).whole.exit_code


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("transformer", "text_encoder")),
        ({"quantize": "none"}, ("text_encoder",)),
        ({"transformer_weight": "dit.safetensors"}, ("text_encoder",)),
        ({"transformer_weight": "dit.safetensors", "quantize_text_encoder": "none"}, ()),
    ],
)
def test_what_the_config_wants_made(changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    """A denoiser that config.yaml replaces is quantized while loading; step 06 has nothing to make of it."""
    from gates import quantized

    model = {"quantize": "auto", "quantize_text_encoder": "auto", "transformer_weight": None}
    assert quantized.wanted({"model": {**model, **changes}}) == expected
