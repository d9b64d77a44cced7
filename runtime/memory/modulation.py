"""A table of what the blocks' modulation says at each sigma of a run, instead of the layers that say it.

In these denoisers a third of all weights turns the embedded sigma into scales, shifts and gates: a function of sigma
alone, as long as nothing that is trained touches it. Every sigma of a run is known ahead, so the answers are
computed once, layer by layer, with weights that come and go; then no step needs those weights.

    models/modulation/<16 hex>/     of the base's weights, their precision, the device and torch
        <16 hex>.bin                64 rows: those of the sigmas that the name is a digest of
        table.json                  what it was made from, and which sigmas are in which file

A row is [modulations, width] in the denoiser's dtype: 4.3 MiB at the published size. Rows of a file come from one
product of always 64 rows, so a row does not depend on how long the run is, and a resumed run reads the same bits.
"""

import os
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime import files
from runtime.errors import DiskFullError, UserError
from runtime.families.facts import Facts
from runtime.memory import loading
from runtime.memory.loading import Piece, Placement, Source

ROWS = 64  # of a file, and of a product
INDEX = "table.json"
SPARE_BYTES = 2**30  # left free on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`groups`: fp32 sigmas in the order of their use; each group has files of its own."""

    folder: Path
    groups: Sequence[Sequence[float]]
    made_from: dict[str, Any]
    """What the rows depend on beside sigma."""
    report: Callable[[str], None] = lambda text: None


class Pick(nn.Module):
    """Its modulation's piece of the rows [B, modulations, width]: [B, `size`]."""

    place: Tensor

    def __init__(self, place: int, size: int, where: torch.device) -> None:
        super().__init__()
        self.size = size
        # A tensor, not a number: compiled blocks then differ in their inputs only, and one compilation serves all.
        self.register_buffer("place", torch.tensor([place], device=where), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows.index_select(1, self.place)[:, 0, : self.size]


class Rows(nn.Module):
    """Stands where sigma is embedded, and hands on the rows that are `placed`."""

    def __init__(self, table: "Table", where: torch.device, *, control_rows: bool) -> None:
        super().__init__()
        self.table, self.where, self.control_rows = table, where, control_rows
        self.placed: Tensor | None = None

    def read(self, sigmas: Tensor) -> Tensor:
        """The rows of `sigmas`, fp32 [B] on the CPU, on the device: [B, modulations, width].

        Where control tokens are modulated as at sigma 0 (2511), B rows for those follow.
        """
        wanted = sigmas.tolist() + ([0.0] * len(sigmas) if self.control_rows else [])
        return self.table.rows(wanted).to(self.where)

    def forward(self, timestep: Tensor, *given: Any) -> Tensor:
        if self.placed is None or len(self.placed) != len(timestep):
            raise RuntimeError("no rows were placed for this batch: ask through runtime.training.objective")
        return self.placed


def rows_of(denoiser: nn.Module) -> Rows | None:
    """The table's reader in `denoiser`; None where its modulation is live."""
    return next((module for module in denoiser.children() if isinstance(module, Rows)), None)


class Table:
    """Rows by sigma, read from mapped files."""

    def __init__(self, folder: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.folder, self.shape, self.dtype = folder, shape, dtype
        self._places: dict[float, tuple[np.ndarray[Any, Any], int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, name: str, sigmas: Sequence[float]) -> None:
        bits = np.int16 if self.dtype.itemsize == 2 else np.int32
        mapped = np.memmap(self.folder / name, dtype=bits, mode="r", shape=(ROWS, *self.shape))
        self._places |= {sigma: (mapped, row) for row, sigma in enumerate(sigmas)}

    def rows(self, sigmas: Sequence[float]) -> Tensor:
        """[B, modulations, width] on the CPU. Raises KeyError for a sigma that the run did not announce."""
        out = np.empty((len(sigmas), *self.shape), np.int16 if self.dtype.itemsize == 2 else np.int32)
        for index, sigma in enumerate(sigmas):
            if sigma not in self._places:
                raise KeyError(f"sigma {sigma!r} is not in the table of {len(self)} rows in {self.folder}")
            mapped, row = self._places[sigma]
            out[index] = mapped[row]
        return torch.from_numpy(out).view(self.dtype)


def install(denoiser: Any, facts: Facts, source: Source, placement: Placement, request: Request) -> None:
    """Replace the modulation of `denoiser`, loaded without it, by a table; rows that are not there yet are made."""
    where = torch.device(placement.device)
    linears = _linears(denoiser, facts)
    width = max(outputs for _, _, outputs in linears)
    shape = (len(linears), width)
    made_from = {**request.made_from, "shape": list(shape), "dtype": str(placement.dtype)}
    folder = request.folder / files.document_digest(made_from)[:16]
    zero = bool(getattr(denoiser.config, "zero_cond_t", False))
    chunks = _chunks([*request.groups, *([[0.0]] if zero else [])])
    size = ROWS * shape[0] * shape[1] * placement.dtype.itemsize
    absent = {name: sigmas for name, sigmas in chunks.items() if not _is_whole(folder / name, size)}
    if absent:
        _refuse_full_disk(folder, len(absent) * size)
        count = sum(map(len, absent.values()))
        request.report(f"modulation of {count} sigmas, into {request.folder.name}/{folder.name}")
        maker = Maker(denoiser, facts, linears, shape, placement)
        maker.make(source, folder, absent)
    known = _read_index(folder)
    files.write_json(folder / INDEX, {"made_from": made_from, "files": {**known, **chunks}})
    table = Table(folder, shape, placement.dtype)
    for name, sigmas in chunks.items():
        table.add(name, sigmas)
    for place, (activation, name, outputs) in enumerate(linears):
        loading.replace(denoiser, activation, Pick(place, outputs, where))
        loading.replace(denoiser, name, nn.Identity())
    loading.replace(denoiser, facts.time_embed, Rows(table, where, control_rows=zero))


def _linears(denoiser: nn.Module, facts: Facts) -> list[tuple[str, str, int]]:
    """Name of the activation, name of the linear and its outputs, in the order of the model."""
    found = []
    for name, module in denoiser.named_modules():
        for activation, pattern in facts.modulations:
            if fnmatchcase(name, pattern) and isinstance(module, nn.Linear):
                stem = name[: len(name) - len(pattern.rpartition(".")[2])]
                found.append((stem + activation.rpartition(".")[2], name, module.out_features))
    return found


def _chunks(groups: Iterable[Sequence[float]]) -> dict[str, list[float]]:
    """File names and their sigmas; a sigma that an earlier group has is not made twice."""
    chunks: dict[str, list[float]] = {}
    seen: set[float] = set()
    for group in groups:
        fresh = [sigma for sigma in dict.fromkeys(group) if sigma not in seen]
        seen |= set(fresh)
        for start in range(0, len(fresh), ROWS):
            part = fresh[start : start + ROWS]
            chunks[f"{files.document_digest([struct.pack('<f', s).hex() for s in part])[:16]}.bin"] = part
    return chunks


def _read_index(folder: Path) -> dict[str, list[float]]:
    """Of files that are still there."""
    try:
        known: dict[str, list[float]] = files.read_json(folder / INDEX)["files"]
    except (OSError, ValueError, KeyError):
        return {}
    return {name: sigmas for name, sigmas in known.items() if (folder / name).is_file()}


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _refuse_full_disk(folder: Path, needed: int) -> None:
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise DiskFullError(
            f"the table of modulations needs {needed / files.GIB:.1f} GiB and {SPARE_BYTES / files.GIB:.0f} GiB to "
            f"spare, {free / files.GIB:.1f} GiB are free in {folder.parent}",
            remedy="free some space, or set train.cached_modulation: false in config.yaml, then finetune plan",
        )


def _appear(path: Path, target: Path) -> None:
    """Under its name, unless another process was first: the two are the same bytes, and one may be in use."""
    if _is_whole(target, path.stat().st_size):
        return
    files.sync(path)
    files.rename(path, target)


class Maker:
    """Computes rows, holding one linear at a time."""

    def __init__(
        self,
        denoiser: Any,
        facts: Facts,
        linears: Sequence[tuple[str, str, int]],
        shape: tuple[int, int],
        placement: Placement,
    ) -> None:
        self.denoiser, self.facts, self.shape = denoiser, facts, shape
        self.placement = Placement(dtype=placement.dtype, device=placement.device, rule=placement.rule)
        self.places = {name: (place, activation) for place, (activation, name, _) in enumerate(linears)}

    @torch.no_grad()
    def make(self, source: Source, folder: Path, chunks: dict[str, list[float]]) -> None:
        """Write each file of `chunks`; it appears when it is whole, whoever else makes the same one meanwhile."""
        embedded = {name: self._embed(sigmas) for name, sigmas in chunks.items()}
        mine = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        open_files = {name: folder / f".{name}.{mine}.tmp" for name in chunks}
        try:
            self._fill(source, open_files, embedded)
            for name, path in open_files.items():
                _appear(path, folder / name)
        finally:
            for path in open_files.values():
                path.unlink(missing_ok=True)

    def _fill(self, source: Source, open_files: dict[str, Path], embedded: dict[str, Tensor]) -> None:
        size = self.shape[0] * self.shape[1] * self.placement.dtype.itemsize
        for path in open_files.values():
            with path.open("wb") as handle:
                handle.truncate(ROWS * size)
        for name in self._loaded(source):
            place, activation = self.places[name]
            for chunk, temb in embedded.items():
                active = self.denoiser.get_submodule(activation)(temb)
                self._write(open_files[chunk], place, self.denoiser.get_submodule(name)(active))
            loading.replace(self.denoiser, name, nn.Linear(1, 1, device="meta"))
        missing = self.places.keys() - set(self._done)
        if missing:
            raise UserError(
                f"the base lacks {len(missing)} modulations, first {min(missing)}", remedy="fetch it again"
            )

    def _embed(self, sigmas: Sequence[float]) -> Tensor:
        """[ROWS, dim], of zeros where there are fewer sigmas."""
        parameter = next(self.denoiser.get_submodule(self.facts.time_embed).parameters())
        padded = torch.tensor([*sigmas, *[0.0] * (ROWS - len(sigmas))], device=parameter.device)
        like = torch.empty(0, dtype=self.placement.dtype, device=parameter.device)
        embedded: Tensor = self.denoiser.get_submodule(self.facts.time_embed)(padded, like)
        return embedded

    def _loaded(self, source: Source) -> Iterable[str]:
        """Names of linears, each when its weight and bias are there; biases of all come first, they are small."""
        self._done: list[str] = []

        def biases(name: str) -> bool:
            return name.removesuffix(".bias") in self.places

        for piece in source.pieces(biases):
            self._put(piece)
        for piece in source.pieces(lambda name: name.removesuffix(".weight") in self.places):
            self._put(piece)
            name = piece.name.removesuffix(".weight")
            self._done.append(name)
            yield name

    def _put(self, piece: Piece) -> None:
        self.placement.put(self.denoiser, piece)

    def _write(self, path: Path, place: int, values: Tensor) -> None:
        """One modulation's part of all rows of a file."""
        bits = torch.int16 if values.dtype.itemsize == 2 else torch.int32
        array = values.contiguous().view(bits).cpu().numpy()
        with path.open("r+b") as handle:
            for row in range(ROWS):
                offset = (row * self.shape[0] + place) * self.shape[1] * values.dtype.itemsize
                handle.seek(offset)
                handle.write(array[row].tobytes())
