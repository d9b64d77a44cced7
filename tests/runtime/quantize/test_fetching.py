"""A base from a hub on this machine: shard by shard, cut anywhere and gone on with, dropped, and told plainly."""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from runtime import files
from runtime.commands.quantize import command
from runtime.config.resolve import resolve
from runtime.planning import plan
from runtime.probes import base
from runtime.progress import Progress
from runtime.quantize import fetching, made, making, nf4, streaming
from runtime.quantize.hub import partial
from runtime.quantize.made import EVIDENCE
from runtime.quantize.meter import Meter

NAME = "someone/tiny-edit"
REVISION = "c0ffee" + "0" * 34
SINGLE = "diffusion_pytorch_model.safetensors"


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of a hub: a model's files with digests, and files with ranges."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.asked: list[tuple[str, str | None]] = []
        """Path and Range of each file that was asked for."""
        self.cuts: dict[str, int] = {}
        """By path, after how many bytes its connection is cut, once."""
        self.ranges = True

    def handle_error(self, *given: Any) -> None:
        """A client that was killed closes its end; that is what the tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def model(self) -> dict[str, Any]:
        siblings = []
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                item: dict[str, Any] = {"rfilename": path.relative_to(self.root).as_posix()}
                item["size"] = path.stat().st_size
                if path.suffix in (".safetensors", ".bin"):
                    item["lfs"] = {"sha256": files.file_digest(path), "size": item["size"], "pointerSize": 1}
                siblings.append(item)
        return {"id": NAME, "sha": REVISION, "siblings": siblings, "private": False, "tags": []}


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # headers and body are two writes: the second would wait 40 ms for an answer
    )

    def log_message(self, *given: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}"):
            self._answer(200, json.dumps(self.server.model()).encode(), {})
        elif (found := re.fullmatch(rf"/{NAME}/resolve/{REVISION}/(.+)", path)) is not None:
            self._file(found[1])
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str) -> None:
        content = (self.server.root / name).read_bytes()
        wanted = self.headers.get("Range")
        self.server.asked.append((name, wanted))
        if wanted is None or not self.server.ranges:
            self._answer(200, content, {}, self.server.cuts.pop(name, None))
            return
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        part = content[int(start) : int(end) + 1 if end else None]
        last = int(start) + len(part) - 1
        headers = {"Content-Range": f"bytes {start}-{last}/{len(content)}"}
        self._answer(206, part, headers, self.server.cuts.pop(name, None) if not end else None)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = cut is not None


@pytest.fixture(scope="module")
def served(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded base, its denoiser in three shards, beside files that nobody should fetch."""
    root = tmp_path_factory.mktemp("served") / "hub"
    shutil.copytree(nano, root, ignore=shutil.ignore_patterns("*.pyc", "README*"))
    _split(root / "transformer")
    for name in ("pytorch_model.bin", "modeling.py", "transformer/pytorch_model.bin", "transformer/code.py"):
        (root / name).write_bytes(b"code" * 9)
    save_file(load_file(root / "vae" / SINGLE), root / "whole.safetensors")
    return root


@pytest.fixture
def hub(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(served)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # this hub is on this machine, whatever the suite is run with
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def _split(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names, weight_map = list(tensors), {}
    for part in range(3):
        shard = f"diffusion_pytorch_model-0000{part + 1}-of-00003.safetensors"
        mine = names[part::3]
        save_file({name: tensors[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, shard)
    files.write_json(folder / f"{SINGLE}.index.json", {"metadata": {}, "weight_map": weight_map})


@pytest.fixture
def online(lab: Any, hub: Hub) -> Any:
    lab.configure({"model.pretrained_model_name_or_path": NAME})
    return lab


def quantize(lab: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--workspace", str(lab.root), *arguments])


def done(lab: Any, *arguments: str) -> Any:
    result = quantize(lab, *arguments)
    assert result.exit_code == 0, result.output
    return lab.workspace.evidence(EVIDENCE)


def fetched(lab: Any) -> set[str]:
    root = lab.root / NAME
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def shards_of(lab: Any) -> list[str]:
    return sorted(path for path in fetched(lab) if path.startswith("transformer/") and "-of-" in path)


def judged(lab: Any) -> dict[str, str]:
    """What gate 06 says, which passes."""
    from gates import chain, registry
    from gates.workspace import Workspace

    verdict = chain.judge(registry.load("06"), Workspace.open(lab.root)).whole
    assert verdict.outcome == "passed", [(check.id, check.message) for check in verdict.checks]
    return {check.id: check.message for check in verdict.checks}


def test_what_is_fetched_is_the_base_and_no_code(online: Any, hub: Hub, conforms: Any) -> None:
    data = done(online, "--model", NAME)
    conforms(json.loads(online.workspace.evidence_path(EVIDENCE).read_text(encoding="utf-8")), "evidence")
    there = fetched(online)
    assert not [path for path in there if path.endswith((".bin", ".py"))] and "whole.safetensors" not in there
    assert {"model_index.json", "vae/" + SINGLE, "tokenizer/tokenizer.json", "fetch.json"} < there
    for path in there - {"fetch.json", "transformer/fetched.json", "text_encoder/fetched.json"}:
        assert (online.root / NAME / path).read_bytes() == (hub.root / path).read_bytes()
    item = next(item for item in data["components"] if item["name"] == "transformer")
    assert (item["fetched"]["repo"], item["fetched"]["revision"], item["fetched"]["dropped"]) == (
        NAME,
        REVISION,
        [],
    )
    assert {f"transformer/{name}": shard["sha256"] for name, shard in item["fetched"]["shards"].items()} == {
        path: files.file_digest(hub.root / path) for path in shards_of(online)
    }
    assert 0 < data["output_error"]["value"] < 0.5


def test_the_weights_are_those_of_the_same_base_on_disk(online: Any, hub: Hub) -> None:
    made_here = online.root / "models/nf4/transformer"
    done(online, "--component", "transformer", "--drop-fetched")
    here = {path.name: path.read_bytes() for path in made_here.glob("*.safetensors")}
    shutil.rmtree(online.root / "models")
    shutil.rmtree(online.root / NAME)
    shutil.copytree(hub.root, online.root / NAME)
    done(online, "--component", "transformer")
    assert here == {path.name: path.read_bytes() for path in made_here.glob("*.safetensors")}


def test_dropped_shards_are_said_plainly_and_later_steps_need_none(online: Any, hub: Hub) -> None:
    data = done(online, "--drop-fetched")
    assert shards_of(online) == [] and f"text_encoder/{'model.safetensors'}" not in fetched(online)
    assert f"vae/{SINGLE}" in fetched(online)
    by_name = {item["name"]: item for item in data["components"]}
    assert len(by_name["transformer"]["fetched"]["dropped"]) == 3
    told = judged(online)
    assert "3 of 3 shards of transformer were dropped" in told["source-untouched"]
    assert "transformer: by what was recorded, its bf16 shards were dropped" in told["error-bounded"]
    assert (
        "the denoiser's output error was not measured, its bf16 shards were dropped" in told["error-bounded"]
    )
    assert data["output_error"]["value"] is None and "not here any more" in data["output_error"]["reason"]
    asked = len(hub.asked)
    model = online.root / NAME
    choices = resolve(
        online.workspace, online.configure({"model.pretrained_model_name_or_path": NAME}).config
    )
    assert choices.config.model.quantize == choices.config.model.quantize_text_encoder == "nf4"
    assert all(item.usable for item in made.find(online.workspace, model).values())
    assert plan.locate_model(online.workspace, NAME) == model
    changes = {"model.pretrained_model_name_or_path": NAME, "train.max_train_steps": 1}
    online.cache(changes)
    assert online.fit(changes).document["state"] == "completed"
    assert done(online, "--drop-fetched")["components"] == data["components"]
    assert len(hub.asked) == asked


def test_with_the_shards_here_again_the_output_is_measured(online: Any, hub: Hub) -> None:
    before = done(online, "--component", "transformer", "--drop-fetched")
    online.configure({"model.pretrained_model_name_or_path": NAME, "model.quantize_text_encoder": "none"})
    for path in (hub.root / "transformer").glob("*.safetensors"):
        shutil.copyfile(path, online.root / NAME / "transformer" / path.name)
    after = done(online, "--component", "transformer")
    assert before["output_error"]["value"] is None and 0 < after["output_error"]["value"] < 0.5
    assert after["components"][0]["made_fingerprint"] == before["components"][0]["made_fingerprint"]
    assert judged(online)["error-bounded"] == "28 layers measured anew"


def test_a_shard_goes_only_after_the_journal_names_what_was_made_of_it(
    online: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, dropped = fetching.Base.drop, []
    folder = online.root / "models/nf4/transformer"

    def checked(self: fetching.Base, path: str) -> None:
        name = path.rpartition("/")[2]
        record = files.read_json(folder / "quantize.json")["shards"][name]
        assert files.file_digest(folder / name) == record["sha256"]
        assert len(shards_of(online)) == 1  # and the next one is not here yet
        dropped.append(name)
        drop(self, path)

    monkeypatch.setattr(fetching.Base, "drop", checked)
    done(online, "--component", "transformer", "--drop-fetched")
    assert len(dropped) == 3


@pytest.mark.parametrize("after", [1, 700_000, 1_500_000])
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    online: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    advance, seen = Meter.advance, 0

    def dying(self: Meter, size: int, text: str) -> None:
        nonlocal seen
        advance(self, size, text)
        seen += size if text.startswith("fetching transformer/") else 0
        if seen > after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Meter, "advance", dying)
        assert quantize(online, "--component", "transformer", "--drop-fetched").exit_code == 130
    assert online.workspace.evidence(EVIDENCE) is None
    left = list((online.root / NAME / "transformer").glob(".*.part"))
    kept = {path.name.removeprefix(".").removesuffix(".part"): path.stat().st_size for path in left}
    assert (after > 1) == any(kept.values())
    missing = base.collect(online.workspace, NAME).components["transformer"].missing_gib * 2**30
    source = online.root / NAME / "transformer"
    if after > 1:  # all texts are here
        shards = files.read_json(source / "fetched.json")["shards"]
        to_come = {n for n in shards if not (online.root / "models/nf4/transformer" / n).is_file()}
        sizes = [shards[n]["size"] for n in to_come if not (source / n).is_file()]
        assert missing == pytest.approx(sum(sizes) - sum(kept.values()), abs=2**10)
    assert missing > 0
    hub.asked.clear()
    done(online, "--component", "transformer", "--drop-fetched")
    assert base.collect(online.workspace, NAME).components["transformer"].missing_gib == 0
    for name, size in kept.items():
        wanted = (f"transformer/{name}", f"bytes={size}-" if size else None)
        assert wanted in hub.asked
    assert not list((online.root / NAME).rglob("*.part"))
    record = files.read_json(online.root / "models/nf4/transformer/quantize.json")
    for name, item in record["shards"].items():
        path = online.root / "models/nf4/transformer" / name
        assert files.file_digest(path) == item["sha256"]


def test_a_connection_that_breaks_goes_on_by_itself(online: Any, hub: Hub) -> None:
    name = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
    hub.cuts[name] = 700_000
    done(online, "--component", "transformer", "--drop-fetched")
    assert (name, None) in hub.asked
    assert [asked for path, asked in hub.asked if path == name and (asked or "").endswith("-")]


def test_a_server_without_ranges_is_told(online: Any, hub: Hub) -> None:
    hub.ranges = False
    result = quantize(online)
    assert result.exit_code == 1 and "gives no part of a file" in result.stderr


def test_other_bytes_than_the_hub_names_are_refused(
    online: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformer/diffusion_pytorch_model-00001-of-00003.safetensors"
    told = hub.model()
    next(it for it in told["siblings"] if it["rfilename"] == name)["lfs"]["sha256"] = "0" * 64
    monkeypatch.setattr(hub, "model", lambda: told)
    result = quantize(online)
    assert result.exit_code == 1 and "came with other bytes" in result.stderr
    assert not (online.root / NAME / name).exists() and not partial(online.root / NAME / name).exists()


def test_what_was_there_before_is_never_dropped(online: Any, hub: Hub) -> None:
    name = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
    place = online.root / NAME / name
    done(online, "--component", "text_encoder")
    place.parent.mkdir(exist_ok=True)
    shutil.copyfile(hub.root / name, place)
    data = done(online, "--component", "transformer", "--drop-fetched")
    assert shards_of(online) == [name]
    item = next(item for item in data["components"] if item["name"] == "transformer")
    assert len(item["fetched"]["dropped"]) == 2


def test_a_foreign_file_in_the_place_of_a_shard_is_refused(online: Any) -> None:
    name = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
    done(online, "--component", "text_encoder")
    place = online.root / NAME / name
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"mine")
    result = quantize(online)
    assert result.exit_code == 1 and "was here already and is not" in result.stderr
    assert place.read_bytes() == b"mine"


def test_a_made_shard_that_is_torn_fetches_its_own_source_only(online: Any, hub: Hub) -> None:
    done(online, "--component", "transformer", "--drop-fetched")
    name = "diffusion_pytorch_model-00003-of-00003.safetensors"
    path = online.root / "models/nf4/transformer" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    hub.asked.clear()
    done(online, "--component", "transformer", "--drop-fetched")
    assert hub.asked == [(f"transformer/{name}", None)] and path.read_bytes() == whole
    assert shards_of(online) == []


def test_the_disk_must_hold_what_is_there_at_once(online: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 1000))
    result = quantize(online)
    assert result.exit_code == 1 and "finetune quantize --drop-fetched, which needs" in result.stderr
    assert not [path for path in fetched(online) if path.endswith(".safetensors")]
    room = making.Room(made=2 * files.GIB, rest=files.GIB, shards=[3 * files.GIB, 5 * files.GIB])
    assert (room.needed(drop=False), room.needed(drop=True)) == (11.0, 8.0)


@pytest.fixture
def packed(online: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub's base with a denoiser that is NF4 already."""
    root = tmp_path / "packed"
    shutil.copytree(hub.root, root)
    rule = nf4.rule_for("transformer", "transformer_blocks")
    source, target = hub.root / "transformer", tmp_path / "nf4"
    job = streaming.Job(component="transformer", source=source, target=target, rule=rule, device="cpu")
    streaming.quantize(job, Progress(quiet=True))
    (target / streaming.JOURNAL).unlink()
    shutil.rmtree(root / "transformer")
    shutil.copytree(target, root / "transformer")
    monkeypatch.setattr(hub, "root", root)
    return online


@pytest.mark.parametrize("linked", [True, False])
def test_a_base_of_nf4_is_fetched_whole_and_taken(
    packed: Any, hub: Hub, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("a volume without links")

    if not linked:
        monkeypatch.setattr(os, "link", refuse)
    weights = {path: path.stat().st_size for path in hub.root.glob("*/*.safetensors")}
    copies = sum(size for path, size in weights.items() if path.parent.name == "transformer")
    needed = sum(weights.values()) + (0 if linked else copies) + files.GIB
    free = needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, free))
    line = ("--component", "transformer", "--drop-fetched")
    packed.configure(
        {"model.pretrained_model_name_or_path": NAME, "model.quantize_text_encoder": "none"}
    )  # so all of it is fetched whole
    result = quantize(packed, *line)
    assert result.exit_code == 1 and "1 GiB to spare are needed" in result.stderr
    assert not [path for path in fetched(packed) if path.endswith(".safetensors")]
    free = needed
    data = done(packed, *line)
    assert data["components"][0]["taken"] == f"{NAME}/transformer" and len(shards_of(packed)) == 3
    for path in (hub.root / "transformer").iterdir():
        mine, here = packed.root / "models/nf4/transformer" / path.name, packed.root / NAME / "transformer"
        assert mine.read_bytes() == path.read_bytes()
        assert mine.samefile(here / path.name) == linked
    told = judged(packed)
    assert "transformer: error not measured, the base's own are NF4" in told["error-bounded"]
    asked = len(hub.asked)
    assert done(packed, *line)["components"] == data["components"] and len(hub.asked) == asked


def test_ready_made_weights_spare_the_shards_of_a_plain_base(
    packed: Any, hub: Hub, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "root", served)
    packed.configure({"model.pretrained_model_name_or_path": NAME, "model.quantize_text_encoder": "none"})
    done(packed, "--component", "transformer", "--made", str(tmp_path / "nf4"))
    assert shards_of(packed) == []
    told = judged(packed)
    assert "transformer: error not measured, the base is not here" in told["error-bounded"]
    assert all(item.usable for item in made.find(packed.workspace, packed.root / NAME).values())
    shutil.copytree(served / "transformer", packed.root / NAME / "transformer", dirs_exist_ok=True)
    with pytest.raises(AssertionError, match="the base's transformer is another now"):
        judged(packed)


def test_without_a_config_both_are_made(lab: Any, hub: Hub) -> None:
    lab.configure()
    lab.workspace.config_path.unlink()
    data = done(lab, "--model", NAME, "--drop-fetched")
    assert [item["name"] for item in data["components"]] == list(making.COMPONENTS)


@pytest.mark.parametrize(
    ("model", "said"), [("other/base", "config.yaml is for the base"), ("./folder/x/y", "is no hub id")]
)
def test_another_model_than_the_config_is_refused(online: Any, model: str, said: str) -> None:
    result = quantize(online, "--model", model)
    assert result.exit_code == 1 and said in result.stderr


def test_a_hub_that_knows_no_such_model(lab: Any, hub: Hub) -> None:
    lab.configure({"model.pretrained_model_name_or_path": "no/body"})
    result = quantize(lab)
    assert result.exit_code == 1 and "no/body can't be fetched from the hub" in result.stderr
    assert not (lab.root / "no").exists()


def test_offline_says_so(online: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = quantize(online)
    assert result.exit_code == 1 and "offline mode" in result.stderr


@pytest.mark.parametrize(
    "path", ["../evil.json", "vae/../../x.json", "vae/a:b.json", "vae/..\\x.json", "a/b/c.json", "vae/x.py"]
)
def test_no_path_leads_out_of_the_folder(path: str) -> None:
    from runtime.quantize.hub import Stored

    item = Stored(size=1, sha256=None)
    listed = fetching._wanted("x/y", {"model_index.json": item, path: item})
    assert list(listed) == ["model_index.json"]


def test_digests_are_those_of_the_bytes(online: Any, hub: Hub) -> None:
    done(online, "--component", "text_encoder")
    state = files.read_json(online.root / NAME / "fetch.json")
    for path, item in state["files"].items():
        content = (hub.root / path).read_bytes()
        assert item["size"] == len(content)
        assert item["sha256"] in (None, hashlib.sha256(content).hexdigest())
