"""A shard to NF4 by many threads: the same bytes, little memory, and a NaN is told."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import save_file
from torch import Tensor

from runtime import shards
from runtime.errors import UserError
from runtime.progress import Progress
from runtime.quantize import crew, nf4, streaming
from runtime.quantize.streaming import Job

SHAPES = [(64, 64), (1, 64), (3, 192), (1025, 512), (2, 2**18), (5, 2**18 + 64)]


def weight(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02).to(dtype)


def states(state: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.as_dict(packed=True).items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_are_what_bitsandbytes_makes_of_the_whole(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """But for the mean of the scales, whose order of addition differs for many of them."""
    given = weight(shape, dtype)
    packed, state = nf4.quantize(given, "cpu")
    whole, expected = quantize_4bit(given, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(packed, whole)
    assert float(state.offset) == pytest.approx(float(expected.offset), rel=1e-6)
    if packed.numel() <= 2**19:
        ours, theirs = states(state), states(expected)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    exact = given.double()
    error = float((dequantize_4bit(packed, state).double() - exact).norm() / exact.norm())
    assert nf4.relative_error(given, packed, state) == pytest.approx(error, rel=1e-5)


def test_the_bits_do_not_depend_on_threads() -> None:
    """33,000 scales and more: from 32,768 values on torch adds in an order that its threads decide."""
    given = weight((2**11, 2**11))
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        with crew.crew(count) as pool:
            assert torch.get_num_threads() == 1
            found.append(nf4.quantize(given, "cpu", pool))
        torch.set_num_threads(count)
        found.append(nf4.quantize(given, "cpu"))
        torch.set_num_threads(before)
    assert torch.get_num_threads() == before
    first_packed, first = found[0]
    for packed, state in found[1:]:
        assert torch.equal(packed, first_packed)
        assert all(torch.equal(states(state)[name], tensor) for name, tensor in states(first).items())


def test_one_is_read_ahead_and_no_more() -> None:
    read: list[int] = []
    gone: list[int] = []
    for value in crew.one_ahead(range(5), lambda n: read.append(n) or n):  # type: ignore[func-returns-value]
        gone.append(value)
        assert max(read) <= value + 1
    assert gone == read == list(range(5))
    assert list(crew.one_ahead([], lambda n: n)) == []
    with pytest.raises(ZeroDivisionError):
        list(crew.one_ahead([1, 0], lambda n: 1 / n))


def folder(root: Path, tensors: dict[str, Tensor]) -> Path:
    source = root / "transformer"
    source.mkdir(parents=True)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text("{}", encoding="utf-8")
    return source


def job(source: Path, target: Path, workers: int | None = None) -> Job:
    rule = nf4.rule_for("transformer", "transformer_blocks")
    return Job(
        component="transformer", source=source, target=target, rule=rule, device="cpu", workers=workers
    )


def test_the_files_do_not_depend_on_workers(tmp_path: Path) -> None:
    tensors = {f"transformer_blocks.{n}.linear.weight": weight((300 + n, 1024)) for n in range(5)}
    source = folder(tmp_path, {**tensors, "proj_out.weight": weight((7, 9)), "proj_out.bias": weight((7, 1))})
    contents = []
    for workers in (1, 2, 5, None):
        target = tmp_path / f"made-{workers}"
        streaming.quantize(job(source, target, workers), Progress(quiet=True))
        contents.append({path.name: path.read_bytes() for path in target.iterdir()})
    assert contents[0].keys() >= {"model.safetensors", "quantize.json", "config.json"}
    assert all(other == contents[0] for other in contents[1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_told(tmp_path: Path, bad: float) -> None:
    spoilt = weight((64, 64))
    spoilt[3, 3] = bad
    source = folder(tmp_path, {"transformer_blocks.0.to_q.weight": spoilt})
    with pytest.raises(UserError, match=r"not finite, in transformer_blocks\.0\.to_q\.weight") as caught:
        streaming.quantize(job(source, tmp_path / "made"), Progress(quiet=True))
    assert '--keep "transformer_blocks.0.to_q"' in caught.value.remedy
    assert not list((tmp_path / "made").glob("*safetensors*"))


def test_a_copied_tensor_is_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "COPIED_BYTES", 1000)
    source = folder(tmp_path, {"a.weight": weight((40, 41)), "b.weight": weight((3, 5))})
    path = source / "model.safetensors"
    header = shards.read_header(path)
    writer = shards.Writer(tmp_path / "out", {name: (it.dtype, it.shape) for name, it in header.items()}, [])
    with pytest.raises(ValueError, match="is not the planned"):
        writer.copy("a.weight", path, header["b.weight"])
    for name, entry in header.items():
        writer.copy(name, path, entry)
    writer.close()
    for name, entry in shards.read_header(tmp_path / "out").items():
        expected = shards.read_tensor(path, header[name])
        assert torch.equal(shards.read_tensor(tmp_path / "out", entry), expected)


MEASURE = """
import sys
import torch
from pathlib import Path
from runtime.quantize import nf4, streaming
from runtime.progress import Progress
def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if "VmHWM" in line)
zeros = torch.zeros(64, 64)
nf4.relative_error(zeros, *nf4.quantize(zeros, "cpu"))
before = most()
rule = nf4.rule_for("transformer", "transformer_blocks")
job = streaming.Job(component="transformer", source=Path(sys.argv[1]), target=Path(sys.argv[2]), rule=rule,
                    device="cpu", workers=2)
streaming.quantize(job, Progress(quiet=True))
print(most() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_memory_grows_by_a_few_layers_whatever_the_size_of_the_base(tmp_path: Path) -> None:
    """Twenty-four layers of 4 MiB and one plain tensor of 192 MiB."""
    tensors = {f"transformer_blocks.{n}.linear.weight": weight((1024, 2048)) for n in range(24)}
    source = folder(tmp_path, {**tensors, "embed.weight": torch.zeros(192, 2**19, dtype=torch.bfloat16)})
    line = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "made")]
    grown = int(subprocess.run(line, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert grown < 150 * 2**20, f"{grown / 2**20:.0f} MiB"
