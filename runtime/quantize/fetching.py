"""A base from the hub, so that quantizing it needs little disk: all but two components at once, those shard by shard.

    <workspace>/<owner>/<name>/       where config.yaml's own words for the model lead, so all later steps find it
        fetch.json                    the commit, its files, and which of them were fetched by this command
        model_index.json  vae/  tokenizer/  ...
        transformer/
            config.json  *.index.json
            fetched.json              each shard with size, digest and tensors, whether it is here or not
            *.safetensors             fetched when their turn comes; with `drop` gone once they are quantized

fetched.json never changes, so what a run and the gate record of the folder names the dropped bytes too. Only
safetensors, texts and JSON are fetched: no code, no pickles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from runtime import files
from runtime.errors import UserError
from runtime.progress import Progress
from runtime.quantize.hub import Repository, Stored
from runtime.quantize.made import LISTING, STATE, partial
from runtime.quantize.meter import Meter
from runtime.shards import WEIGHTS, Entry

TEXTS = (".json", ".txt", ".jinja", ".model")


@dataclass(slots=True, kw_only=True)
class Base:
    """A model that is here in part."""

    folder: Path
    repository: Repository
    stored: dict[str, Stored]
    """By path in the repository."""
    fetched: list[str] = field(default_factory=list)
    """Paths that this command fetched; others were here before, and are never removed."""

    def save(self) -> None:
        files.write_json(
            self.folder / STATE,
            {
                "schema": "fetch/1",
                "repo": self.repository.name,
                "revision": self.repository.revision,
                "files": {path: asdict(item) for path, item in self.stored.items()},
                "fetched": sorted(self.fetched),
            },
        )

    def missing(self, paths: Sequence[str]) -> int:
        """Bytes of `paths` that are yet to come."""
        return sum(self.stored[path].size - self._there(path) for path in paths)

    def _there(self, path: str) -> int:
        target = self.folder / path
        if target.is_file():
            return self.stored[path].size
        part = partial(target)
        return min(part.stat().st_size, self.stored[path].size) if part.is_file() else 0

    def get(self, path: str, meter: Meter) -> Path:
        """The file at `path`, fetched where it is not here."""
        target = self.folder / path
        if not target.is_file():
            self.repository.fetch(path, self.stored[path], target, meter)
            self.fetched.append(path)
            self.save()
        elif path not in self.fetched:
            self._refuse_other(path, target)
        return target

    def _refuse_other(self, path: str, target: Path) -> None:
        stored = self.stored[path]
        same = target.stat().st_size == stored.size
        if not (same and (stored.sha256 is None or files.file_digest(target) == stored.sha256)):
            raise UserError(
                f"{target} was here already and is not {path} of {self.repository.name}",
                remedy="move it away, then finetune quantize",
            )

    def drop(self, path: str) -> None:
        """Remove a file, if this command fetched it."""
        if path in self.fetched:
            (self.folder / path).unlink(missing_ok=True)
            self.fetched.remove(path)
            self.save()


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """The shards of one component, as a Source of `streaming`."""

    base: Base
    name: str
    drop: bool

    @property
    def folder(self) -> Path:
        return self.base.folder / self.name

    @property
    def one_by_one(self) -> bool:
        return self.drop

    @property
    def names(self) -> Sequence[str]:
        return sorted(self._listing()["shards"])

    def _listing(self) -> dict[str, Any]:
        return files.read_json(self.folder / LISTING)  # type: ignore[no-any-return]

    def header(self, name: str) -> Mapping[str, Entry]:
        tensors = self._listing()["shards"][name]["tensors"]
        return {tensor: _entry(item) for tensor, item in tensors.items()}

    def to_fetch(self, name: str) -> int:
        return self.base.missing([f"{self.name}/{name}"])

    def open(self, name: str, meter: Meter) -> Path:
        return self.base.get(f"{self.name}/{name}", meter)

    def release(self, name: str) -> None:
        if self.drop:
            self.base.drop(f"{self.name}/{name}")

    def identity(self) -> str:
        names = (LISTING, "config.json")
        return files.document_digest({name: files.file_digest(self.folder / name) for name in names})

    def record(self) -> dict[str, Any]:
        shards = self._listing()["shards"]
        return {
            "repo": self.base.repository.name,
            "revision": self.base.repository.revision,
            "shards": {name: {key: item[key] for key in ("size", "sha256")} for name, item in shards.items()},
            "dropped": [name for name in sorted(shards) if not (self.folder / name).is_file()],
        }


def _entry(item: Mapping[str, Any]) -> Entry:
    return Entry(dtype=item["dtype"], shape=tuple(item["shape"]), start=item["start"], size=item["size"])


# ---- opening


def standing(folder: Path) -> Base | None:
    """The base that an earlier call began in `folder`; None where there is none."""
    try:
        document = files.read_json(folder / STATE)
    except FileNotFoundError:
        return None
    return Base(
        folder=folder,
        repository=Repository(document["repo"], document["revision"]),
        stored={path: Stored(**item) for path, item in document["files"].items()},
        fetched=list(document["fetched"]),
    )


def open_base(name: str, folder: Path, progress: Progress) -> Base:
    """The base in `folder`, its texts here: the model's index, configs, tokenizer, the indices of shards.

    A base that was begun goes on at its commit. Raises UserError for a repository that is no base of safetensors.
    """
    base = standing(folder)
    if base is None:
        repository, stored = Repository.of(name)
        base = Base(folder=folder, repository=repository, stored=_wanted(name, stored))
        base.save()
    texts = [path for path in base.stored if not path.endswith(".safetensors")]
    _get(base, texts, f"fetch {name}", progress)
    return base


def fetch_rest(base: Base, later: Sequence[str], progress: Progress) -> None:
    """All weights but those of the components in `later`."""
    _get(base, rest(base, later), f"fetch {base.repository.name}", progress)


def rest(base: Base, later: Sequence[str]) -> list[str]:
    """Paths of the weights that `fetch_rest` gets."""
    parts = {path.rpartition("/")[0] for path in base.stored if path.endswith(".safetensors")}
    return [path for part in sorted(parts - set(later)) for path in _weights(base, part)]


def weights_size(base: Base, component: str) -> int:
    """Bytes of a component's weights, whether they are here or not."""
    return sum(base.stored[path].size for path in _weights(base, component))


def _get(base: Base, paths: Sequence[str], label: str, progress: Progress) -> None:
    if not base.missing(paths):
        return
    meter = Meter(progress, label, base.missing(paths))
    try:
        for path in paths:
            base.get(path, meter)
    finally:
        meter.stop()


def _wanted(name: str, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Texts and weights of the components that lie in folders of their own."""
    if "model_index.json" not in stored:
        raise UserError(
            f"{name} is no diffusers model: it has no model_index.json", remedy="choose another base"
        )
    found = {}
    for path, item in stored.items():
        place = PurePosixPath(path)
        text = place.suffix in TEXTS and (len(place.parts) == 2 or path == "model_index.json")
        if (text or (place.suffix == ".safetensors" and len(place.parts) == 2)) and _is_plain(place):
            found[path] = item
    return found


def _is_plain(place: PurePosixPath) -> bool:
    """No way out of the folder, on Windows neither."""
    return not any(part.startswith(".") or set(part) & set('\\:*?"<>|') for part in place.parts)


def _weights(base: Base, component: str) -> list[str]:
    """As `shards.find` chooses among files that are here."""
    here = [
        path for path in base.stored if path.startswith(f"{component}/") and path.endswith(".safetensors")
    ]
    for name in WEIGHTS:
        index = base.folder / component / f"{name}.index.json"
        if index.is_file():
            named = {f"{component}/{shard}" for shard in files.read_json(index)["weight_map"].values()}
            absent = named - set(here)
            if absent:
                raise UserError(
                    f"{base.repository.name} lacks {min(absent)}, which its index names",
                    remedy="choose another base",
                )
            return sorted(named)
        if f"{component}/{name}" in here:
            return [f"{component}/{name}"]
    return sorted(here)


def component_of(base: Base, component: str, *, drop: bool) -> Component:
    """A component whose shards are fetched when their turn comes; headers are a thousandth of the weights."""
    if not (base.folder / component / LISTING).is_file():
        _describe(base, component)
    return Component(base=base, name=component, drop=drop)


def _describe(base: Base, component: str) -> None:
    paths = _weights(base, component)
    if not paths:
        raise UserError(
            f"{base.repository.name} has no {component}/*.safetensors", remedy="choose another base"
        )
    described = {}
    for path in paths:
        tensors = {name: asdict(entry) for name, entry in base.repository.header(path).items()}
        described[path.rpartition("/")[2]] = {**asdict(base.stored[path]), "tensors": tensors}
    repository = base.repository
    document = {"schema": "fetched/1", "repo": repository.name, "revision": repository.revision}
    files.write_json(base.folder / component / LISTING, {**document, "shards": described})
