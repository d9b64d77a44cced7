"""The cache as it lies on disk: the manifest, each entry's own record, and the identity of its tensors."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates import prompt_file, schema
from gates.buckets import SIZE_MULTIPLES, UNSTATED, final_sizes
from gates.evidence import (
    EvidenceError,
    MissingEvidenceError,
    Reading,
    attempt,
    differences,
    document_digest,
    file_digest,
    inside,
    read_json,
)
from gates.pictures import picture_size
from gates.tensors import read_header
from gates.workspace import Workspace

REMEDY = "finetune cache"
DATASET, SCAN = ".gates/evidence/02-dataset.json", "finetune dataset"
TENSORS = "tensors.safetensors"
UNNAMED_MODE = "exact"  # of a VAE in a manifest that names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    id: str
    split: str
    key: str
    path: str
    document: dict[str, Any] | None
    """what the key was made of; None where entry.json can't be read"""
    faults: tuple[str, ...]
    """why the entry is not whole"""
    tensors: Reading[dict[str, str]]
    """name to digest of dtype, shape and bytes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    path: str
    manifest: dict[str, Any]
    entries: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        return document_digest(self.manifest["entries"])

    def of(self, *splits: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.split in splits]


def read(workspace: Workspace) -> Cache:
    folder = workspace.resolve(workspace.settings["cache"]["cache_dir"])
    manifest = workspace.json(folder / "manifest.json", "cache-manifest", remedy=REMEDY)
    shown = workspace.shown(folder)
    return Cache(
        path=shown,
        manifest=manifest,
        entries=tuple(_entry(folder, shown, record) for record in manifest["entries"]),
    )


def prompts(workspace: Workspace) -> list[dict[str, Any]]:
    """What config.yaml asks for beside the dataset: id, prompt, digests and sizes of the controls, as they are now."""
    found, validation = [], workspace.settings["validation"]
    asked = [
        {**sample, "paths": [workspace.resolve(image) for image in sample["images"]]}
        for sample in validation["samples"]
    ]
    if validation["prompt_file"] is not None:
        asked += prompt_file.read(workspace, validation["prompt_file"])
    for index, sample in enumerate(asked):
        paths = sample["paths"]
        absent = [workspace.shown(path) for path in paths if not path.is_file()]
        if absent:
            raise MissingEvidenceError(absent[0], "is missing", remedy="gate check 04")
        measures = [picture_size(path, workspace.shown(path)) for path in paths]
        found.append(
            {
                "id": f"prompt-{index}",
                "prompt": sample["prompt"],
                "controls": [file_digest(path) for path in paths],
                "measures": [(height, width) for width, height in measures],
                "size": sample.get("size"),
                "negative_prompt": sample.get("negative_prompt"),
            }
        )
    return found


def trained_digest(workspace: Workspace) -> str:
    """The digest that a run records: of the training entries alone, which are all that it fits."""
    return document_digest([entry for entry in _listed(workspace) if entry["split"] == "train"])


def digest_now(workspace: Workspace) -> str:
    """The digest of all entries, held-out samples and prompts among them, which a validation records."""
    return document_digest(_listed(workspace))


def _listed(workspace: Workspace) -> list[dict[str, Any]]:
    """The manifest's entries, without looking at what they name."""
    folder = workspace.resolve(workspace.settings["cache"]["cache_dir"])
    manifest = workspace.json(folder / "manifest.json", "cache-manifest", remedy=REMEDY)
    entries: list[dict[str, Any]] = manifest["entries"]
    return entries


def _entry(cache: Path, shown: str, record: dict[str, Any]) -> Entry:
    folder = inside(cache, record["folder"])
    shown = f"{shown}/{record['folder']}"
    faults = [f"{record['id']}: its folder is not the start of its key"] * (
        record["folder"] != record["key"][:16]
    )
    own = attempt(lambda: _own_record(folder / "entry.json", f"{shown}/entry.json"))
    if own.value is None:
        faults.append(str(own.error))
    else:
        faults += _own_faults(own.value, record, shown)
    torn = differences(folder, record["files"], shown)
    faults += torn or (_shape_faults(folder, own.value, shown) if own.value else [])
    return Entry(
        id=record["id"],
        split=record["split"],
        key=record["key"],
        path=shown,
        document=own.value["document"] if own.value else None,
        faults=tuple(faults),
        tensors=attempt(lambda: tensor_digests(folder / TENSORS, f"{shown}/{TENSORS}")),
    )


def _own_record(path: Path, shown: str) -> dict[str, Any]:
    document: dict[str, Any] = schema.require(read_json(path, shown), "cache-entry", shown)
    return document


def _own_faults(own: dict[str, Any], record: dict[str, Any], shown: str) -> list[str]:
    faults = [
        f"{shown}/entry.json: {name} is not the manifest's"
        for name in ("key", "files")
        if own[name] != record[name]
    ]
    if document_digest(own["document"]) != own["key"]:
        faults.append(f"{shown}/entry.json: its key is not the digest of its document")
    if TENSORS not in own["files"]:
        faults.append(f"{shown}/entry.json: it lists no {TENSORS}")
    return faults


def _shape_faults(folder: Path, own: dict[str, Any], shown: str) -> list[str]:
    held = attempt(lambda: read_header(folder / TENSORS, f"{shown}/{TENSORS}"))
    if held.value is None:
        return [str(held.error)]
    written = {name: list(entry.shape) for name, entry in held.value.items()}
    told = {name: tensor["shape"] for name, tensor in own["tensors"].items()}
    return [] if written == told else [f"{shown}/entry.json: its tensors are not those of {TENSORS}"]


def tensor_digests(path: Path, shown: str) -> dict[str, str]:
    """Identity of each tensor, by which two can be told apart without holding them."""
    entries = read_header(path, shown)
    digests = {}
    try:
        with path.open("rb") as handle:
            for name, entry in entries.items():
                handle.seek(entry.start)
                head = f"{entry.dtype} {entry.shape} ".encode()
                digests[name] = hashlib.sha256(head + handle.read(entry.size)).hexdigest()
    except FileNotFoundError:
        raise MissingEvidenceError(shown, "is missing") from None
    except OSError as error:
        raise EvidenceError(shown, f"can't be read ({error.strerror})") from error
    return digests


# ---- faults


def whole_faults(cache: Cache, samples: list[dict[str, Any]]) -> list[str]:
    """Entries that are torn, absent, or of no sample; counts that are not those of the entries."""
    faults = [fault for entry in cache.entries for fault in entry.faults]
    if not cache.manifest["complete"]:
        faults.insert(0, "the cache phase was begun and not finished")
    wanted = {(sample["split"], sample["id"]) for sample in samples}
    listed = [(entry.split, entry.id) for entry in cache.of("train", "holdout")]
    there = set(listed)
    faults += [f"no entry for the {split} sample {name}" for split, name in sorted(wanted - there)]
    faults += [f"an entry for {split} {name}, which is no sample" for split, name in sorted(there - wanted)]
    faults += [f"two entries for {name}" for (_, name), times in sorted(Counter(listed).items()) if times > 1]
    faults += [
        f"the manifest counts {count} {split} entries and lists {len(cache.of(split))}"
        for split, count in cache.manifest["counts"].items()
        if count != len(cache.of(split))
    ]
    return faults


def config_faults(
    cache: Cache, dataset: dict[str, Any], settings: dict[str, Any], asked: list[dict[str, Any]]
) -> list[str]:
    """Where the cache was made for another config or dataset than those of now."""
    faults = list(_settings_faults(cache.manifest["settings"], settings))
    if cache.manifest["dataset_digest"] != dataset["dataset_digest"]:
        faults.append("the dataset has changed since the cache was made")
    step = SIZE_MULTIPLES.get(cache.manifest["settings"].get("family", ""))
    if step is None:
        return [
            *faults,
            f"made for the family {cache.manifest['settings'].get('family')}, which is not known",
        ]
    samples = {(sample["split"], sample["id"]): sample for sample in dataset["samples"]}
    sources = {source["name"]: source["settings"] for source in dataset["sources"]}
    if strangers := sorted({sample["source"] for sample in samples.values()} - sources.keys()):
        raise EvidenceError(
            DATASET, f"names the source {strangers[0]}, of which it says nothing", remedy=SCAN
        )
    wished = {
        key: _wished(sample, sources[sample["source"]], settings, step) for key, sample in samples.items()
    }
    wished |= {("prompt", prompt["id"]): _wished_prompt(prompt, settings, step) for prompt in asked}
    there = set()
    for entry in cache.entries:
        there.add((entry.split, entry.id))
        faults += _entry_faults(entry, cache.manifest["settings"], wished.get((entry.split, entry.id)))
    prompts = {("prompt", prompt["id"]) for prompt in asked}
    faults += [
        f"no entry for {name} of validation.samples or its prompt_file" for _, name in sorted(prompts - there)
    ]
    return faults


def _settings_faults(cached: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    """What all entries share, against the keys of the config that decide it; what is left to choice is not told."""
    processing, encoders = cached.get("processing"), cached.get("encoders")
    if not isinstance(processing, dict) or not isinstance(encoders, dict):
        yield "the manifest does not say how samples were processed"
        return
    processor, data = settings["data"]["processor"], settings["data"]
    expected = {"background": processor["background"], "max_prompt_tokens": data["max_prompt_tokens"]}
    if processor["vl_pixels"] is not None:
        expected["vl_pixels"] = processor["vl_pixels"]
    for name, value in expected.items():
        if processing.get(name) != value:
            yield f"{name}: {processing.get(name)} in the cache, {value} configured"
    for name, value in settings["cache"]["dtypes"].items():
        made = encoders.get(name)
        used = made.get("compute_dtype", made.get("dtype")) if isinstance(made, dict) else None
        if value != "auto" and used != value:
            yield f"cache.dtypes.{name}: {used} in the cache, {value} configured"
    vae, mode = encoders.get("vae"), settings["cache"]["vae"]
    used = vae.get("mode", UNNAMED_MODE) if isinstance(vae, dict) else None
    if used != mode:
        yield f"cache.vae: {used} in the cache, {mode} configured"


def encoders(cache: Cache) -> dict[str, dict[str, Any]]:
    """What the manifest says of the components that encoded, by name."""
    found = cache.manifest["settings"].get("encoders")
    items = found.items() if isinstance(found, dict) else ()
    return {name: item for name, item in items if isinstance(item, dict)}


def encoder_faults(cache: Cache, now: Mapping[str, str]) -> list[str]:
    """Components whose weights are others than the cache was made with."""
    return [
        f"another {name} than the cache was made with"
        for name, made in encoders(cache).items()
        if name in now and made.get("fingerprint") != now[name]
    ]


def _wished(
    sample: dict[str, Any], source: dict[str, Any], settings: dict[str, Any], step: int
) -> dict[str, Any]:
    """The parts of a key document that dataset and config decide."""
    processor, validation = settings["data"]["processor"], settings["validation"]
    train = sample["split"] == "train"
    controls = [(control["height"], control["width"]) for control in sample["controls"]]
    measure = (sample["target"]["height"], sample["target"]["width"])
    return {
        "prompt": sample["prompt"],
        "alternatives": sample["alternatives"] if train else [],
        "target": sample["target"]["sha256"],
        "controls": [control["sha256"] for control in sample["controls"]],
        "mask": sample["mask"]["sha256"] if sample["mask"] else None,
        "sizes": final_sizes(processor, source, step, measure, controls),
        "empty_prompt": train and settings["data"]["caption_dropout_rate"] > 0,
        "negative_prompt": None if train else _negative(validation),
    }


def _wished_prompt(prompt: dict[str, Any], settings: dict[str, Any], step: int) -> dict[str, Any]:
    processor, negative = settings["data"]["processor"], _negative(settings["validation"])
    if prompt["size"] is not None:
        processor = {**processor, "target_size": prompt["size"], "enable_bucket": False}
    if negative is not None and prompt["negative_prompt"] is not None:
        negative = prompt["negative_prompt"]
    return {
        "prompt": prompt["prompt"],
        "controls": prompt["controls"],
        "sizes": final_sizes(processor, UNSTATED, step, None, prompt["measures"]),
        "negative_prompt": negative,
    }


def _negative(validation: dict[str, Any]) -> str | None:
    return validation["negative_prompt"] if validation["guidance_scale"] > 1 else None


def _entry_faults(entry: Entry, common: dict[str, Any], wished: dict[str, Any] | None) -> Iterator[str]:
    document = entry.document or {}
    if wished is None:
        if entry.split == "prompt":
            yield f"an entry for {entry.id}, which validation.samples and its prompt_file don't ask for"
        return
    for name, value in {"settings": common, **wished}.items():
        if name == "sizes" and document.get(name) != value:
            yield f"{entry.id}: {_sizes(document.get(name))} in the cache, {_sizes(value)} configured"
        elif document.get(name) != value:
            yield f"{entry.id}: another {name}"
    yield from (
        f"{entry.id}: no tensor {name}" for name in _tensors_wanted(document) - set(entry.tensors.get())
    )


def _sizes(sizes: Any) -> str:
    if not isinstance(sizes, dict):
        return "no sizes"
    return "+".join("x".join(map(str, size)) for size in (sizes["target"], *sizes["controls"]))


def _tensors_wanted(document: dict[str, Any]) -> set[str]:
    names = {"prompt_embeds", *(f"control_{index}" for index in range(len(document.get("controls", []))))}
    names |= {f"prompt_embeds_{number}" for number, _ in enumerate(document.get("alternatives", []), 1)}
    optional = {"target": "target", "mask": "mask"}
    optional |= {"empty_prompt": "empty_embeds", "negative_prompt": "negative_embeds"}
    return names | {tensor for key, tensor in optional.items() if document.get(key) not in (None, False)}


def collisions(cache: Cache) -> list[str]:
    """Entries that share a tensor although what it was made of differs."""
    held: dict[str, dict[str, dict[Any, str]]] = defaultdict(lambda: defaultdict(dict))
    for entry in cache.entries:
        tensors = entry.tensors.get()
        for kind, name, source in _sources(entry.document or {}):
            if name in tensors:  # an absent one is `cache-matches-config`'s to tell
                held[kind][tensors[name]].setdefault(source, entry.id)
    return [
        f"{_both(group)} share {kind}"
        for kind, groups in held.items()
        for group in groups.values()
        if len(group) > 1
    ]


def _sources(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(kind, tensor, what it was made of): within a kind, other sources must give other tensors."""
    controls = tuple(document["controls"])
    texts = {"prompt_embeds": document["prompt"], "negative_embeds": document.get("negative_prompt")}
    texts |= {f"prompt_embeds_{number}": text for number, text in enumerate(document["alternatives"], 1)}
    texts["empty_embeds"] = "" if document.get("empty_prompt") else None
    for name, text in texts.items():
        if text is not None:
            yield "embeddings", name, (" ".join(text.split()), controls)
    for index, control in enumerate(controls):
        yield "control latents", f"control_{index}", control
    if document.get("target") is not None:
        yield "target latents", "target", document["target"]


def _both(group: dict[Any, str]) -> str:
    return " and ".join(list(group.values())[:2])
