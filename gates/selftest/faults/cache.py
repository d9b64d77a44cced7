"""Faults of gate 07, phase cache."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from gates.evidence import document_digest
from gates.selftest.editing import recorded, write_json
from gates.selftest.faults.row import Fault, Spoil, fault
from gates.selftest.faults.run_edits import truncate
from gates.selftest.fits import cache_entry, trained_digest


def _first_entry(made: Any) -> Path:
    document = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
    return made.root / "cache" / document["entries"][0]["folder"]  # type: ignore[no-any-return]


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit("cache/manifest.json", change)


def _roundtrip(**values: Any) -> Spoil:
    def change(document: dict[str, Any]) -> None:
        document["data"]["samples"][1].update(values)

    return lambda made: made.edit(made.evidence("07-cache-roundtrip"), change)


def share(name: str) -> Spoil:
    """Two entries with one tensor, recorded as if the cache phase had written it so."""

    def spoil(made: Any) -> None:
        manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
        folders = [made.root / "cache" / entry["folder"] for entry in manifest["entries"][:2]]
        path = folders[1] / "tensors.safetensors"
        tensors = load_file(path)
        tensors[name] = load_file(folders[0] / path.name)[name]
        save_file(tensors, path)
        files = {path.name: recorded(folders[1])[path.name]}
        made.edit(folders[1] / "entry.json", lambda d: d.update(files=files))
        manifest["entries"][1]["files"] = files
        write_json(made.root / "cache/manifest.json", manifest)
        follow(made, manifest)

    return spoil


def rebuild(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Spoil:
    """The cache made anew from changed samples and settings, whole in itself; runs and roundtrip follow."""

    def spoil(made: Any) -> None:
        dataset = json.loads(made.evidence("02-dataset").read_text(encoding="utf-8"))["data"]
        manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
        change(dataset, manifest["settings"])
        shutil.rmtree(made.root / "cache")
        manifest["entries"] = [
            cache_entry(made.root / "cache", sample, manifest["settings"]) for sample in dataset["samples"]
        ]
        write_json(made.root / "cache/manifest.json", manifest)
        follow(made, manifest)

    return spoil


def follow(made: Any, manifest: dict[str, Any]) -> None:
    """Roundtrip and runs are of the cache as it is now."""
    digest = document_digest(manifest["entries"])
    made.edit(made.evidence("07-cache-roundtrip"), lambda d: d["data"].update(manifest_digest=digest))
    trained = trained_digest(manifest)
    for kind in ("smoke", "full"):
        made.edit(made.run(kind) / "run.json", lambda document: document.update(cache_digest=trained))


FAULTS: tuple[Fault, ...] = (
    fault(
        "no cache",
        {"cache/cache-complete", "smoke/run-matches-inputs", "full/run-matches-inputs"},
        lambda m: (m.root / "cache/manifest.json").unlink(),
    ),
    fault(
        "an entry's tensors deleted",
        {"cache/cache-complete"},
        lambda m: (_first_entry(m) / "tensors.safetensors").unlink(),
    ),
    fault(
        "an entry cut short",
        {"cache/cache-complete"},
        truncate(lambda m: _first_entry(m) / "tensors.safetensors"),
    ),
    fault(
        "an entry.json cut short",
        {"cache/cache-complete"},
        truncate(lambda m: _first_entry(m) / "entry.json"),
    ),
    fault("an entry's folder deleted", {"cache/cache-complete"}, lambda m: shutil.rmtree(_first_entry(m))),
    fault(
        "the key is not the document's",
        {"cache/cache-complete"},
        lambda m: m.edit(_first_entry(m) / "entry.json", lambda d: d["document"].update(prompt="x")),
    ),
    fault(
        "tensors of another shape than told",
        {"cache/cache-complete"},
        lambda m: m.edit(
            _first_entry(m) / "entry.json", lambda d: d["tensors"]["target"].update(shape=[4, 8, 8])
        ),
    ),
    fault(
        "the cache phase did not finish",
        {"cache/cache-complete"},
        _manifest(lambda d: d.update(complete=False)),
    ),
    fault(
        "counts that are not true",
        {"cache/cache-complete"},
        _manifest(lambda d: d["counts"].update(train=12)),
    ),
    fault(
        "another resolution",
        {"cache/cache-matches-config", "smoke/run-matches-inputs", "full/run-matches-inputs"},
        lambda m: m.edit_config(lambda c: c["data"]["processor"].update(controls_size=[64, 64])),
    ),
    fault(
        "caption dropout without empty embeddings",
        {"cache/cache-matches-config", "smoke/run-matches-inputs", "full/run-matches-inputs"},
        lambda m: m.edit_config(lambda c: c["data"].update(caption_dropout_rate=0.1)),
    ),
    fault(
        "the VAE another way than it encoded",
        {"cache/cache-matches-config"},
        lambda m: m.edit_config(lambda c: c.setdefault("cache", {}).update(vae="folded")),
    ),
    fault(
        "a cache of tiles where none are configured",
        {"cache/cache-matches-config"},
        rebuild(lambda dataset, settings: settings["encoders"]["vae"].update(mode="tiled")),
    ),
    fault(
        "guidance without negative embeddings",
        {"cache/cache-matches-config"},
        lambda m: m.edit_config(lambda c: c.update(validation={"guidance_scale": 4.0})),
    ),
    fault(
        "made for another dataset",
        {"cache/cache-matches-config"},
        _manifest(lambda d: d.update(dataset_digest="0" * 64)),
    ),
    fault("no roundtrip", {"cache/cache-roundtrip"}, lambda m: m.evidence("07-cache-roundtrip").unlink()),
    fault(
        "roundtrip of another cache",
        {"cache/cache-roundtrip"},
        lambda m: m.edit(
            m.evidence("07-cache-roundtrip"), lambda d: d["data"].update(manifest_digest="0" * 64)
        ),
    ),
    fault("embeddings that differ", {"cache/cache-roundtrip"}, _roundtrip(embeds_error=0.03)),
    fault(
        "embeddings further off than the encoder rounds",
        {"cache/cache-roundtrip"},
        _roundtrip(embeds_error=0.1, embeds_rounding=0.04),
    ),
    fault(
        "an encoder that answers otherwise beside another prompt",
        {"cache/cache-roundtrip"},
        _roundtrip(embeds_error=0.2, embeds_rounding=0.2),
    ),
    fault("latents that differ", {"cache/cache-roundtrip"}, _roundtrip(latents_error=0.5)),
    fault("pictures of noise", {"cache/cache-roundtrip"}, _roundtrip(decoded_psnr_db=7.0)),
    fault(
        "nothing encoded again",
        {"cache/cache-roundtrip"},
        lambda m: m.edit(m.evidence("07-cache-roundtrip"), lambda d: d["data"].update(samples=[])),
    ),
    *(
        fault(f"two samples with one {name}", {"cache/cache-distinct"}, share(name))
        for name in ("prompt_embeds", "control_0", "target")
    ),
    fault(
        "an entry of another prompt",
        {"cache/cache-matches-config"},
        rebuild(lambda dataset, settings: dataset["samples"][5].update(prompt="another")),
    ),
)
