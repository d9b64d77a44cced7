"""Accidents and lazy edits: whatever lies in the workspace, `gate check` ends with 0, 1, 2 or 3 and no traceback."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gates import chain, checks, cli, evidence, registry
from gates.selftest.editing import Made, write_json
from gates.workspace import Workspace

RUN = "outputs/edit-lora/v1"
EVIDENCE = ".gates/evidence"


@pytest.fixture
def check(made: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """check("07") -> exit status and verdict. The gate itself must not have broken."""

    def run(gate: str, *options: str) -> tuple[int, dict[str, Any]]:
        start = time.monotonic()
        status = cli.main(["check", gate, "--workspace", str(made.root), "--json", *options])
        assert time.monotonic() - start < 20  # two loaded cores; a second on a quiet machine
        told = capsys.readouterr()
        assert "Traceback" not in told.out + told.err
        assert not (made.root / ".gates/error.log").exists()
        assert str(made.root) not in told.out
        verdict = json.loads(told.out) if told.out else {}
        assert not [c for c in verdict.get("checks", []) if "Error: " in c["message"]]
        return status, verdict

    return run


# ---- documents that are none

WRONG: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{state: running}\n",
    "a key twice": b'{"schema": 1, "schema": 2}\n',
    "NaN": b'{"schema": NaN}\n',
    "1e400": b'{"schema": 1e400}\n',
    "a number of 400 digits": b'{"schema": ' + b"1" * 400 + b"}\n",
    "a number of 5000 digits": b'{"schema": ' + b"1" * 5000 + b"}\n",
    "nested 100,000 deep": b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "nested 65 deep": b"[" * 65 + b"]" * 65 + b"\n",
    "a list": b"[]\n",
    "null": b"null\n",
    "UTF-16": '{"schema": 1}\n'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}\n",
    "zeros, as a lost write leaves": b"\0" * 4096 + b"\n",
    "half of a surrogate pair": b'{"schema": "\\ud800"}\n',
}

# a document, the gate that reads it first, and the exit status where it is none
DOCUMENTS: dict[str, tuple[str, int]] = {
    ".gates/target.json": ("01", 3),
    f"{EVIDENCE}/01-host.json": ("01", 3),
    f"{EVIDENCE}/02-dataset.json": ("02", 3),
    f"{EVIDENCE}/03-environment.json": ("03", 3),
    f"{EVIDENCE}/04-plan.json": ("04", 3),
    f"{EVIDENCE}/05-adaptation.json": ("05", 3),
    f"{EVIDENCE}/06-quantize.json": ("06", 3),
    f"{EVIDENCE}/07-cache-roundtrip.json": ("07", 3),
    f"{EVIDENCE}/08-validation.json": ("08", 3),
    "cache/manifest.json": ("07", 3),
    "cache/ENTRY/entry.json": ("07", 1),  # judged to be torn, which `finetune cache` mends
    "cache/ENTRY/tensors.safetensors": ("07", 1),
    "outputs/edit-lora/v0/run.json": ("07", 3),
    f"{RUN}/run.json": ("07", 3),
    f"{RUN}/metrics.jsonl": ("07", 3),
    f"{RUN}/probe.jsonl": ("07", 3),
    f"{RUN}/saves.jsonl": ("07", 3),
    f"{RUN}/checkpoint-5-60/pytorch_lora_weights.safetensors": ("07", 1),
    f"{RUN}/checkpoint-last-5-60-last/trainer_state.json": ("07", 1),
    "models/nf4/transformer/diffusion_pytorch_model.safetensors": ("06", 3),
}


def _place(made: Made, name: str) -> Path:
    manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
    return made.root / name.replace("ENTRY", manifest["entries"][0]["folder"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_that_is_none(document: str, made: Any, check: Any) -> None:
    gate, status = DOCUMENTS[document]
    place = _place(made, document)
    whole = place.read_bytes()
    for name, content in WRONG.items():
        place.write_bytes(content)
        # What has not one line is a run that recorded nothing, and fails.
        wanted = 1 if name == "empty" and document.endswith(".jsonl") else status
        assert check(gate)[0] == wanted, name
    place.write_bytes(whole)
    assert check(gate)[0] == 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_100_mb_are_refused_at_once(document: str, made: Any, check: Any) -> None:
    gate, status = DOCUMENTS[document]
    with _place(made, document).open("r+b") as handle:
        handle.truncate(100 * 2**20)
    start = time.process_time()
    assert check(gate)[0] == status
    assert time.process_time() - start < 5  # 1 of them for the gates before


def test_a_config_of_100_mb_or_nested_too_deeply(made: Any, check: Any) -> None:
    for content in (b"model: " + b"[" * 2_000, b"#" * 100 * 2**20, b'model: "\\ud800"\n', b"\xff\xfe\0"):
        (made.root / "config.yaml").write_bytes(content)
        assert check("04")[0] in (1, 3)


# ---- lazy edits


def test_an_edited_verdict_is_not_trusted_and_is_written_anew(made: Any, check: Any) -> None:
    (made.dataset / "training_images/s05.txt").unlink()
    assert check("02")[0] == 1
    place = made.root / ".gates/verdicts/02.json"
    for change in ({"verdict": "PASS", "outcome": "passed"}, {"checks": []}, {"schema": 3}):
        document = json.loads(place.read_text(encoding="utf-8"))
        write_json(place, {**document, **change})
        assert check("02") == (1, json.loads(place.read_text(encoding="utf-8")))
        assert json.loads(place.read_text(encoding="utf-8"))["verdict"] == "FAIL"
    place.write_bytes(b"PASS")
    assert check("03")[1]["blocked_by"] == "02"


def _other(made: Made, name: str, source: str) -> None:
    shutil.copy(made.evidence(source), made.evidence(name))


LAZY: dict[str, tuple[str, int, Callable[[Made], object]]] = {
    "evidence of another gate": ("03", 3, lambda m: _other(m, "03-environment", "01-host")),
    "evidence that says complete, and has nothing": (
        "05", 3, lambda m: m.edit(m.evidence("05-adaptation"), lambda d: d.update(data={}))
    ),
    "evidence of another schema": (
        "01", 3, lambda m: m.edit(m.evidence("01-host"), lambda d: d.update(schema="evidence/9"))
    ),
    "the smoke run told to be the full one": (
        "07", 1, lambda m: (shutil.rmtree(m.run("full")), shutil.copytree(m.run("smoke"), m.run("full")))
    ),
    "the validation of another run": (
        "08", 1, lambda m: m.edit(m.evidence("08-validation"), lambda d: d["data"].update(run="outputs/x/v1"))
    ),
    "a run that is its own ancestor": (
        "07", 3, lambda m: m.edit(m.run("full") / "run.json", lambda d: d.update(resumed_from={
            "run_id": "run-v1", "run": "v1", "step": 3, "checkpoint": "c", "digest": "0" * 64}))
    ),
    "an ancestor outside of the project": (
        "07", 1, lambda m: m.edit(m.run("full") / "run.json", lambda d: d.update(resumed_from={
            "run_id": "run-v1", "run": "../../etc", "step": 3, "checkpoint": "c", "digest": "0" * 64}))
    ),
    "a checkpoint outside of the run": (
        "07", 3, lambda m: m.edit_lines(m.run("full") / "saves.jsonl",
                                        lambda lines: lines[0].update(path="../../../../etc"))
    ),
    "a picture outside of the workspace": (
        "08", 3, lambda m: m.edit(m.evidence("08-validation"), lambda d: d["data"]["samples"][0]["pictures"][
            "base"].update(path="../../etc/passwd"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_edit(name: str, made: Any, check: Any) -> None:
    gate, status, edit = LAZY[name]
    edit(made)
    seen, verdict = check(gate)
    assert (seen, verdict["verdict"]) == (status, "FAIL")


# ---- clocks

PAST, FUTURE = "1970-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z"


def _times(document: Any, value: str) -> Any:
    names = ("measured_at", "launched_at", "heartbeat_at", "ended_at", "updated_at", "created_at", "at")
    if isinstance(document, dict):
        return {k: value if k in names and v else _times(v, value) for k, v in document.items()}
    return [_times(item, value) for item in document] if isinstance(document, list) else document


@pytest.mark.parametrize("value", [PAST, FUTURE])
@pytest.mark.parametrize("which", ["evidence", "run.json", "metrics.jsonl", "saves.jsonl", "manifest.json"])
def test_a_clock_that_jumped_changes_no_verdict(which: str, value: str, made: Any, check: Any) -> None:
    """The judge asks for steps and digests: when something was measured proves nothing."""
    places = (made.root / EVIDENCE).glob("*.json") if which == "evidence" else made.root.rglob(which)
    for path in list(places):
        edit = made.edit_lines if path.suffix == ".jsonl" else made.edit
        edit(path, lambda document: _times(document, value))
    assert check("08")[0] == 0


def test_a_full_run_launched_before_its_smoke_run_passes_as_configured(made: Any, check: Any) -> None:
    made.edit(made.run("full") / "run.json", lambda d: d.update(launched_at=PAST))
    assert check("07")[0] == 0


# ---- zero checks


def test_zero_checks_are_no_pass(made: Any, monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    from dataclasses import replace

    load = registry.load
    monkeypatch.setattr(registry, "load", lambda number: replace(load(number), judge=lambda evidence: []))
    status, verdict = check("01")
    assert (status, verdict["verdict"], verdict["outcome"]) == (3, "FAIL", "error")


# ---- links

linked = pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")


@linked
@pytest.mark.parametrize(
    ("name", "gate", "status"),
    [
        (f"{EVIDENCE}/01-host.json", "01", 3),
        (EVIDENCE, "01", 3),
        (f"{RUN}/checkpoint-5-60/pytorch_lora_weights.safetensors", "07", 3),
        (f"{RUN}/checkpoint-5-60", "07", 3),
        ("cache/ENTRY/tensors.safetensors", "07", 3),
        ("cache/ENTRY", "07", 3),
        ("models/nf4/transformer/config.json", "06", 3),
        (f"{RUN}/validation/base", "08", 3),
        # A whole folder on a larger disk is no accident: all in it is judged as it lies there.
        ("cache", "07", 0),
        ("outputs", "07", 0),
        (RUN, "07", 0),
    ],
)
def test_a_link_out_of_the_workspace(
    name: str, gate: str, status: int, made: Any, check: Any, tmp_path: Path
) -> None:
    place, outside = _place(made, name), tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)
    assert check(gate)[0] == status


@linked
@pytest.mark.parametrize("document", [*DOCUMENTS, EVIDENCE, RUN, "cache", "outputs", "data", "models/nf4"])
def test_a_link_to_itself(document: str, made: Any, check: Any) -> None:
    place = _place(made, document)
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    place.symlink_to(place.name)
    status, verdict = check("08")
    assert status in (1, 3) or (status, document) == (2, ".gates/target.json")
    assert verdict.get("verdict", "FAIL") == "FAIL"


@pytest.mark.parametrize(
    "place", ["data/training_images", RUN + "/checkpoint-5-60", "models/base/transformer"]
)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_name_that_is_no_text(place: str, made: Any, check: Any) -> None:
    try:
        Path(os.fsdecode(os.fsencode(made.root / place) + b"/\xff.png")).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system refuses such names")
    status, verdict = check("07")
    assert (status, verdict["verdict"]) == (1, "FAIL")


# ---- what changes meanwhile


VANISHING = [
    f"{EVIDENCE}/02-dataset.json", "data/training_images/s05.txt", "data/training_images/s05.png",
    "data/holdout.txt", "cache/manifest.json", "cache/ENTRY/entry.json", "cache/ENTRY/tensors.safetensors",
    f"{RUN}/run.json", f"{RUN}/metrics.jsonl", f"{RUN}/checkpoint-5-60/pytorch_lora_weights.safetensors",
    "models/base/transformer/config.json", "models/nf4/transformer/config.json",
]  # fmt: skip


@pytest.mark.parametrize("name", VANISHING)
def test_a_file_that_vanishes_midway(
    name: str, made: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when it is looked for, and gone when it is opened."""
    place = _place(made, name)
    if not place.exists():
        place.write_text("s00\ns01\ns02\n", encoding="utf-8", newline="\n")
    opened = Path.open

    def open_(self: Path, *args: Any, **options: Any) -> Any:
        if self == place:
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    status, verdict = check("08")
    assert (status in (1, 3)) and verdict["verdict"] == "FAIL"


def test_a_run_that_is_still_going_blocks(made: Any, check: Any) -> None:
    made.edit(
        made.run("full") / "run.json", lambda d: d.update(state="running", ended_at=None, done_steps=30)
    )
    made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines[:30])
    with (made.run("full") / "metrics.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"step": 31, "lo')
    status, verdict = check("07")
    assert (status, verdict["outcome"], verdict["next_command"]) == (1, "blocked", "finetune monitor --wait")
    assert check("08")[1]["blocked_by"] == "07"


@pytest.mark.parametrize("name", ["metrics", "probe", "saves"])
def test_a_torn_last_line_is_left_out(name: str, made: Any, check: Any) -> None:
    path = made.run("full") / f"{name}.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 61, "los')
    assert check("07")[0] == 0
    path.write_bytes(whole[:-20])  # of these, the last line counts
    # The last line of saves tells of a prune that the folders show anyway.
    assert check("07")[0] == (0 if name == "saves" else 1)
    path.write_bytes(b'{"step": 61, "los\n' + whole)
    assert check("07")[0] == 3


# ---- the walls themselves


def test_no_check_and_no_collector_lets_an_os_error_through(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = OSError(5, "Input/output error", str(made.root / "cache" / "x.bin"))

    def failing(*args: Any) -> Any:
        raise secret

    assert str(evidence.attempt(failing).error).startswith("x.bin: could not be read while it was judged")
    gate = registry.load("01")
    from dataclasses import replace

    verdict = chain.judge(replace(gate, collect=failing), Workspace.open(made.root)).whole
    assert verdict.outcome == "error" and str(made.root) not in json.dumps(verdict.to_json())
    one: checks.Checks[Any] = checks.Checks()
    one.check("x", title="x", section="1", remedy="x", why="x")(failing)
    (found,) = one.run(None)
    assert found.status == "error" and found.message.startswith("x.bin: could not be read")
