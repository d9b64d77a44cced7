import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gates import chain, cli, inventory, registry
from gates.evidence import document_digest
from gates.verdict import Verdict, render
from gates.verify import ALLOWABLE, Verified, exit_code, verify
from gates.workspace import Workspace

ALL = list(registry.numbers())
LABELS = {*ALL, "07-cache", "07-smoke", "07-full"}


def judged(root: Path, **options: Any) -> None:
    workspace = Workspace.open(root, **{k: options.pop(k) for k in ("require_device",) if k in options})
    for item in chain.judge_up_to(workspace, "08", **options):
        item.write(workspace)


@pytest.fixture
def stored(made: Any) -> Any:
    judged(made.root)
    return made


def _verify(root: Path, numbers: list[str] = ALL, allowed: tuple[str, ...] = ()) -> list[Verified]:
    return verify(Workspace.open(root), numbers, allowed)


def _open(found: list[Verified]) -> set[tuple[str, str | None, str]]:
    """What is not confirmed: gate, phase, check, as the whole gates' verdicts have it."""
    return {
        (item.label, f.phase, f.id)
        for item in found
        for f in item.findings
        if f.id and f.state != "confirmed" and len(item.label) == 2
    }


def _file(root: Path, label: str) -> Path:
    return root / ".gates" / "verdicts" / f"{label}.json"


def _edit(path: Path, change: Callable[[dict[str, Any]], Any], *, redigest: bool = False) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    if redigest:
        names = ("gate", "phase", "inputs", "checks")
        document["judgement_digest"] = document_digest({name: document[name] for name in names})
    path.write_text(render(document), encoding="utf-8", newline="\n")


def test_a_healthy_workspace_is_confirmed_and_nothing_is_written(stored: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in stored.root.rglob("*")}
    found = _verify(stored.root)
    assert {item.label for item in found} == LABELS and exit_code(found) == 0
    assert {f.state for item in found for f in item.findings} == {"confirmed"}
    assert {path: path.stat().st_mtime_ns for path in stored.root.rglob("*")} == before


def test_no_stored_verdict_confirms_nothing(made: Any) -> None:
    found = _verify(made.root)
    assert (found, exit_code(found)) == ([], 3)


# ---- absent inputs

CLASSES = {
    "dataset": ["data"],
    "cache": ["cache/*/"],
    "nf4": ["models/nf4"],
    "base": ["models/base"],
    "adapter": ["outputs/*/*/checkpoint-[0-9]*"],
    "last": ["outputs/*/*/checkpoint-last*"],
    "pictures": ["outputs/*/*/validation"],
}


def _remove(root: Path, patterns: list[str]) -> None:
    for pattern in patterns:
        for path in list(root.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("kind", CLASSES)
def test_what_a_class_carries_is_what_the_table_says(stored: Any, kind: str) -> None:
    _remove(stored.root, CLASSES[kind])
    found = _verify(stored.root)
    assert exit_code(found) == 3 and {item.state for item in found} == {"confirmed", "unverifiable"}
    assert _open(found) == {key for key, kinds in inventory.RESTS.items() if kind in kinds}
    word = inventory.KINDS[kind]
    rests = {name for item in found for f in item.findings for name in f.rests_on}
    assert rests == {word}
    if word in ALLOWABLE:
        assert exit_code(_verify(stored.root, allowed=(word,))) == 0
    others = tuple(name for name in ALLOWABLE if name != word)
    assert exit_code(_verify(stored.root, allowed=others)) == 3


def test_an_absent_file_excuses_no_changed_one_of_its_class(stored: Any) -> None:
    (stored.dataset / "training_images/s05.txt").unlink()
    (stored.dataset / "training_images/s06.txt").write_text("another caption\n", encoding="utf-8")
    found = _verify(stored.root, ["02"], ALLOWABLE)
    assert exit_code(found) == 1
    told = [f.message for item in found for f in item.findings if f.id == "manifest-matches-files"]
    assert told == ["data/training_images/s06.txt has other bytes than were recorded"]


@pytest.mark.parametrize(
    ("path", "labels"),
    [
        (".gates/evidence/05-adaptation.json", {"05"}),
        ("outputs/edit-lora/v0/run.json", {"07", "07-cache", "07-smoke", "07-full"}),
    ],
)
def test_an_absent_record_can_not_be_allowed_and_blocks_nothing(
    stored: Any, path: str, labels: set[str]
) -> None:
    (stored.root / path).unlink()
    found = _verify(stored.root, allowed=ALLOWABLE)
    assert {item.label for item in found if item.state == "unverifiable"} == labels
    assert {item.state for item in found if item.label not in labels} == {"confirmed"}
    assert exit_code(found) == 3


# ---- changes


@pytest.mark.parametrize(
    ("path", "label", "name"),
    [
        ("outputs/edit-lora/v1/metrics.jsonl", "07-full", "metrics.jsonl"),
        (".gates/evidence/01-host.json", "01", "01-host.json"),
        ("config.yaml", "04", "config.yaml"),
    ],
)
def test_a_changed_input_is_named(stored: Any, path: str, label: str, name: str) -> None:
    place = stored.root / path
    place.write_bytes(place.read_bytes() + (b"\n" if path.endswith("l") else b" "))
    found = {item.label: item for item in _verify(stored.root)}
    assert found[label].state == "contradicted"
    stale = [f.message for f in found[label].findings if f.message.startswith("stale")]
    assert [name in message for message in stale] == [True]


def test_a_gate_that_fails_now_contradicts_those_after_it(stored: Any) -> None:
    (stored.dataset / "training_images/s05.txt").write_text("", encoding="utf-8")
    found = {item.label: item.state for item in _verify(stored.root)}
    assert found.pop("01") == "confirmed" and set(found.values()) == {"contradicted"}


@pytest.mark.parametrize("options", [{"strict": True}, {"require_device": "xpu"}, {}])
def test_fails_and_blocks_are_confirmed_as_well(made: Any, options: dict[str, Any]) -> None:
    if not options:
        (made.dataset / "training_images/s05.txt").unlink()
    judged(made.root, **options)
    found = _verify(made.root)
    assert {item.state for item in found} == {"confirmed"}
    assert ("FAIL" in {item.verdict for item in found}) == (options != {"strict": True})


def test_a_failed_check_stays_so_where_its_input_is_absent(made: Any) -> None:
    (made.dataset / "training_images/s05.txt").write_text("another caption\n", encoding="utf-8")
    judged(made.root)
    _remove(made.root, ["data"])
    found = {item.label: item for item in _verify(made.root, allowed=("dataset",))}
    assert {item.state for item in found.values()} == {"confirmed"} and found["02"].verdict == "FAIL"


# ---- edits


def _mutations(value: Any) -> st.SearchStrategy[Any]:
    """Another value, mostly of the same kind."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, str):
        same = st.sampled_from(["PASS", "FAIL", "passed", "failed", "pass", "fail", "skip", value + "x", ""])
    elif isinstance(value, (int, float)):
        same = st.sampled_from([value + 1, 0, -1])
    elif isinstance(value, list):
        same = st.sampled_from([value[:-1], [*value, *value[-1:]], value[1:], value[::-1]])
    else:
        same = st.sampled_from([None, {}, "x", "06"])
    return same.filter(lambda other: other != value or type(other) is not type(value))


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, but for what says when and by which version it was judged."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    found = [path] if path else []
    for key, child in children:
        if path or key not in ("judged_at", "tool"):
            found += _places(child, (*path, key))
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, workspaces: Any) -> Path:
    root = tmp_path_factory.mktemp("verify") / "ws"
    workspaces.healthy(root)
    judged(root)
    return root


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), label=st.sampled_from(sorted(LABELS - {"07", "07-full", "08"})), redigest=st.booleans()
)
def test_every_edited_verdict_is_contradicted(template: Path, data: Any, label: str, redigest: bool) -> None:
    path = _file(template, label)
    whole = path.read_bytes()
    document = json.loads(whole)
    place = data.draw(st.sampled_from(_places(document)))
    *outer, last = place
    parent = document
    for key in outer:
        parent = parent[key]
    if isinstance(parent[last], list) and len(parent[last]) < 2 and not parent[last]:
        parent[last] = ["x"]
    else:
        parent[last] = data.draw(_mutations(parent[last]))
    try:
        _edit(path, lambda _: None)
        path.write_text(render(document), encoding="utf-8", newline="\n")
        if redigest and place[0] != "judgement_digest":
            _try_redigest(path)
        if path.read_bytes() != whole:
            found = {item.label: item for item in _verify(template, [label[:2]])}
            assert found[label].state == "contradicted", place
    finally:
        path.write_bytes(whole)


def _try_redigest(path: Path) -> None:
    """A careful forger, where the document is still whole enough."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        _edit(path, lambda document: document.update(counts=_counts(document)), redigest=True)


def _counts(document: dict[str, Any]) -> dict[str, int]:
    return Verdict.from_json(document).counts


@pytest.mark.parametrize("absent", [(), ("data", "models", "cache/*/", "outputs/*/*/checkpoint*")])
def test_an_edit_is_seen_where_the_input_is_absent_too(stored: Any, absent: tuple[str, ...]) -> None:
    _edit(_file(stored.root, "07-full"), lambda d: d["checks"][5].update(message="fell by far"))
    _remove(stored.root, list(absent))
    found = {item.label: item for item in _verify(stored.root, allowed=ALLOWABLE)}
    assert found["07-full"].state == "contradicted"
    assert "it was edited" in found["07-full"].findings[0].message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"[]", "no JSON object"),
        (b'{"gate": "01", "gate": "01"}', "twice"),
        (b'{"gate": "01"}', "is no verdict"),
        (b"[" * 5000, "nested"),
        (b'{"gate": NaN}', "holds NaN"),
    ],
)
def test_what_is_no_verdict_is_refused(stored: Any, text: bytes, message: str) -> None:
    _file(stored.root, "03").write_bytes(text)
    found = {item.label: item for item in _verify(stored.root)}
    assert (found["03"].state, found["03"].verdict) == ("contradicted", None)
    assert message in found["03"].findings[0].message
    assert {item.state for label, item in found.items() if label != "03"} == {"confirmed"}


def test_a_verdict_under_another_name_is_refused(stored: Any) -> None:
    shutil.copy(_file(stored.root, "01"), _file(stored.root, "02"))
    shutil.copy(_file(stored.root, "01"), _file(stored.root, "zz"))
    found = {item.label: item.findings[0].message for item in _verify(stored.root, ["02"])}
    assert found == {"02": "refused: it is a verdict on 01", "zz": "refused: it is a verdict on 01"}


def test_a_forged_pass_with_its_digest_made_anew(made: Any) -> None:
    made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines[3].update(loss=None))
    judged(made.root)

    def forge(document: dict[str, Any]) -> None:
        for check in document["checks"]:
            if check["status"] == "fail":
                check.update(status="pass", remedy="")
        document.update(verdict="PASS", outcome="passed", first_failure=None, counts=_counts(document))

    _edit(_file(made.root, "07-full"), forge, redigest=True)
    found = {item.label: item for item in _verify(made.root, allowed=ALLOWABLE)}
    assert found["07-full"].state == "contradicted"
    told = {f.id: f.message for f in found["07-full"].findings if f.state == "contradicted"}
    assert told["loss-finite"].startswith("stored pass, judged again fail: step 4: loss None")


# ---- the command


@pytest.mark.parametrize(
    ("remove", "arguments", "code", "last"),
    [
        ([], (), 0, "gate verify: confirmed; of 11 verdicts 11 confirmed"),
        ([], ("02",), 0, "gate verify: confirmed; of 1 verdicts 1 confirmed"),
        (["data"], (), 3, "absent: dataset; next: add --allow-absent dataset"),
        (["data"], ("--allow-absent", "dataset"), 0, "resting on recorded digests: dataset"),
        (["config.yaml"], ("01",), 0, "confirmed"),
        ([], ("--allow-absent", "evidence"), 2, ""),
        ([], ("09",), 2, ""),
        ([".gates/target.json"], (), 2, ""),
    ],
)
def test_the_command(
    stored: Any,
    capsys: pytest.CaptureFixture[str],
    remove: list[str],
    arguments: tuple[str, ...],
    code: int,
    last: str,
) -> None:
    _remove(stored.root, remove)
    assert cli.main(["verify", *arguments, "--workspace", str(stored.root)]) == code
    out = capsys.readouterr().out
    assert last in (out.splitlines() or [""])[-1]


def test_the_command_as_json(stored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads(_file(stored.root, "01").read_text(encoding="utf-8"))
    _edit(_file(stored.root, "01"), lambda document: document.update(summary="all well"))
    assert cli.main(["verify", "01", "--json", "--workspace", str(stored.root)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "contradicted"
    (verdict,) = document["verdicts"]
    counts = {"confirmed": len(before["checks"]), "contradicted": 0, "unverifiable": 0}
    assert verdict["counts"] == counts
    assert [f["message"] for f in verdict["findings"] if f["state"] != "confirmed"] == [
        f"summary is all well, judged again {before['summary']}"
    ]
