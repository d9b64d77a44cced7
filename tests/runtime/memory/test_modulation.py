"""The table against the live layers: the same bits where the product has the same shape."""

import gc
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runtime import files
from runtime.errors import DiskFullError
from runtime.families.base import Conditioning
from runtime.families.facts import QWEN_IMAGE_EDIT
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.memory import modulation
from runtime.memory.modulation import ROWS, Request

SIGMAS = [float(np.float32(value)) for value in (0.9, 0.25, 0.501, 1.0)]
FAMILY = QwenImageEdit()


def request(folder: Path, *groups: Sequence[float]) -> Request:
    return Request(folder=folder, groups=groups or [SIGMAS], made_from={"base": "nano"})


def load(base: Path, table: Request | None = None, **options: Any) -> Any:
    given = {"device": "cpu", "dtype": torch.float32, "quantize": "none", **options}
    return FAMILY.load_denoiser(base, table=table, **given)


def ask(denoiser: Any, sigma: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    count = len(sigma)
    told = Conditioning(
        embeds=torch.randn(count, 9, 64, generator=draw),
        mask=None,
        controls=(torch.randn(count, 16, 8, 8, generator=draw),),
    )
    noisy = torch.randn(count, 16, 8, 8, generator=draw)
    rows = modulation.rows_of(denoiser)
    if rows is not None:
        rows.placed = rows.read(sigma)
    return FAMILY.predict(denoiser, noisy.to(dtype), sigma, told.to("cpu", dtype)).float()


@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_rows_are_bit_equal_to_the_live_layers_in_a_product_of_that_shape(
    nano: Path, tmp_path: Path, quantize: str, dtype: torch.dtype
) -> None:
    live = load(nano, dtype=dtype, quantize=quantize)
    cached = load(nano, request(tmp_path), dtype=dtype, quantize=quantize)
    sigma = torch.tensor([*SIGMAS, *[0.0] * (ROWS - len(SIGMAS))])
    temb = live.time_text_embed(sigma, torch.empty(0, dtype=dtype))
    rows = modulation.rows_of(cached)
    assert rows is not None
    rows.placed = rows.read(torch.tensor(SIGMAS))
    for index, block in enumerate(live.transformer_blocks):
        for stream in ("img_mod", "txt_mod"):
            picked = getattr(cached.transformer_blocks[index], stream)(rows.placed)
            assert torch.equal(picked, getattr(block, stream)(temb)[: len(SIGMAS)]), (index, stream)
    last = live.norm_out
    assert torch.equal(
        cached.norm_out.linear(cached.norm_out.silu(rows.placed)),
        last.linear(last.silu(temb))[: len(SIGMAS)],
    )


@pytest.mark.parametrize("dtype, most", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("samples", [1, 2])
@torch.no_grad()
def test_the_answer_is_the_live_one_but_for_rounding(
    nano: Path, tmp_path: Path, dtype: torch.dtype, most: float, samples: int
) -> None:
    live, cached = load(nano, dtype=dtype), load(nano, request(tmp_path), dtype=dtype)
    sigma = torch.tensor(SIGMAS[:samples])
    one, two = ask(live, sigma, dtype), ask(cached, sigma, dtype)
    assert float((one - two).norm() / one.norm()) < most
    other = ask(cached, torch.tensor(SIGMAS[1 : 1 + samples]), dtype)
    assert (
        float((one - other).norm() / one.norm()) > 10 * most
    )  # the rows of another sigma are another answer


@torch.no_grad()
def test_control_tokens_modulated_as_at_sigma_0_have_their_row(nano: Path, tmp_path: Path) -> None:
    base = tmp_path / "2511"
    shutil.copytree(nano, base)
    path = base / "transformer" / "config.json"
    files.write_json(path, {**files.read_json(path), "zero_cond_t": True})
    live, cached = load(base), load(base, request(tmp_path / "table"))
    for samples in (1, 2):
        sigma = torch.tensor(SIGMAS[:samples])
        one, two = ask(live, sigma), ask(cached, sigma)
        assert float((one - two).norm() / one.norm()) < 2e-6
        assert float((one - ask(load(nano), sigma)).norm() / one.norm()) > 1e-3


def test_no_weight_of_the_modulation_is_kept(nano: Path, tmp_path: Path) -> None:
    live, cached = load(nano), load(nano, request(tmp_path))
    gone = {name for name, _ in live.named_parameters()} - {name for name, _ in cached.named_parameters()}
    assert gone == {
        name
        for name, _ in live.named_parameters()
        if "_mod." in name or name.startswith(("norm_out", "time_text_embed"))
    }
    assert len(gone) == 2 * 2 * 2 + 2 + 4
    assert not any(parameter.is_meta for parameter in cached.parameters())


def test_one_linear_is_held_at_a_time_while_the_table_is_made(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 a list of the layers once kept 12.6 GiB alive that the table was there to save."""
    written, most = modulation.Maker._write, []

    def held() -> int:
        gc.collect()
        found = [o for o in gc.get_objects() if type(o) is nn.Parameter and o.shape == (6 * 128, 128)]
        return sum(not parameter.is_meta for parameter in found)

    def counted(self: Any, *given: Any) -> None:
        most.append(held())
        written(self, *given)

    before = held()
    monkeypatch.setattr(modulation.Maker, "_write", counted)
    load(nano, request(tmp_path))
    assert before <= max(most) <= before + 1


def test_rows_do_not_depend_on_how_long_the_run_is(nano: Path, tmp_path: Path) -> None:
    """So a resumed or prolonged run reads the same bits; files that are there are not made again."""
    steps = [float(np.float32((i + 1) / 200)) for i in range(150)]
    load(nano, request(tmp_path / "short", steps[:100], SIGMAS))
    table = load(nano, request(tmp_path / "long", steps, SIGMAS))
    reader = modulation.rows_of(table)
    assert reader is not None and len(reader.table) == 150 + len(set(SIGMAS) - set(steps))
    short, long = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.bin")}
        for name in ("short", "long")
    )
    shared = short.keys() & long.keys()
    assert len(shared) == 2 and all(short[name] == long[name] for name in shared)
    rows = {step: reader.table.rows([step]) for step in steps[64:100]}
    again = load(nano, request(tmp_path / "short", steps[:100], SIGMAS))
    shorter = modulation.rows_of(again)
    assert shorter is not None
    assert all(torch.equal(shorter.table.rows([step]), row) for step, row in rows.items())


def test_what_is_there_is_not_made_again_and_another_base_has_its_own(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(nano, request(tmp_path))
    (folder,) = tmp_path.iterdir()
    told = json.loads((folder / modulation.INDEX).read_text(encoding="utf-8"))
    assert told["made_from"]["base"] == "nano" and list(told["files"].values()) == [SIGMAS]
    monkeypatch.setattr(modulation.Maker, "make", lambda *given: pytest.fail("made again"))
    load(nano, request(tmp_path))
    monkeypatch.undo()
    load(nano, Request(folder=tmp_path, groups=[SIGMAS], made_from={"base": "another"}))
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interruption_leaves_no_file_that_looks_whole(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = modulation.Maker._write
    calls = []

    def stop(self: Any, *given: Any) -> None:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        written(self, *given)

    monkeypatch.setattr(modulation.Maker, "_write", stop)
    with pytest.raises(KeyboardInterrupt):
        load(nano, request(tmp_path))
    assert not list(tmp_path.rglob("*.bin"))
    monkeypatch.undo()
    cached = load(nano, request(tmp_path))
    assert torch.isfinite(ask(cached, torch.tensor(SIGMAS[:1]))).all()
    assert not list(tmp_path.rglob(".*.tmp"))


def test_two_that_make_the_same_rows_at_once_both_read_whole_ones(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process that begins in the middle once cut the file of the first, and zeros stayed for good."""
    alone = load(nano, request(tmp_path / "alone"))
    written, begun = modulation.Maker._write, []

    def disturbed(self: Any, *given: Any) -> None:
        if len(begun) == 1:
            begun.append("second")
            load(nano, request(tmp_path / "shared"))
        begun.append("write")
        written(self, *given)

    monkeypatch.setattr(modulation.Maker, "_write", disturbed)
    first = load(nano, request(tmp_path / "shared"))
    second = load(nano, request(tmp_path / "shared"))
    sigma = torch.tensor(SIGMAS[:1])
    assert torch.equal(ask(first, sigma), ask(alone, sigma))
    assert torch.equal(ask(second, sigma), ask(alone, sigma))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_file_that_is_cut_is_made_again(nano: Path, tmp_path: Path) -> None:
    whole = ask(load(nano, request(tmp_path)), torch.tensor(SIGMAS[:1]))
    (path,) = tmp_path.rglob("*.bin")
    path.write_bytes(path.read_bytes()[:-8])
    assert torch.equal(ask(load(nano, request(tmp_path)), torch.tensor(SIGMAS[:1])), whole)


def test_a_sigma_that_was_not_announced_is_refused(nano: Path, tmp_path: Path) -> None:
    cached = load(nano, request(tmp_path))
    with pytest.raises(KeyError, match=r"0\.123.* is not in the table of 4 rows"):
        ask(cached, torch.tensor([0.123]))
    rows = modulation.rows_of(cached)
    assert rows is not None
    rows.placed = None
    with pytest.raises(RuntimeError, match="no rows were placed"):
        FAMILY.predict(
            cached,
            torch.zeros(1, 16, 4, 4),
            torch.tensor(SIGMAS[:1]),
            Conditioning(embeds=torch.zeros(1, 3, 64), mask=None, controls=()),
        )


def test_a_full_disk_is_told_before_anything_is_made(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modulation, "SPARE_BYTES", 2**60)
    with pytest.raises(DiskFullError, match="table of modulations needs"):
        load(nano, request(tmp_path))


@pytest.mark.parametrize(
    "modules, expected",
    [
        (["transformer_blocks.0.attn.to_q"], []),
        (["transformer_blocks.7.img_mod.1"], ["transformer_blocks.7.img_mod.1"]),
        (["norm_out.linear", "proj_out"], ["norm_out.linear"]),
        (["time_text_embed.timestep_embedder.linear_1"], ["time_text_embed.timestep_embedder.linear_1"]),
        (["transformer_blocks.7.img_mlp.net.2"], []),
    ],
)
def test_what_a_trained_module_touches(modules: list[str], expected: list[str]) -> None:
    assert QWEN_IMAGE_EDIT.move_modulation(modules) == expected
