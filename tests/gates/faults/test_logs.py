"""Reading a log: its head and tail, whatever its encoding, size and line ends."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gates.faults import library, logs
from gates.faults.logs import Line

SPIRV = "InvalidModule: uses extension 'SPV_KHR_bfloat16'"


@pytest.mark.parametrize("code", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encodings_and_line_ends(code: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(f"Loading transformer{end}{end}ümlaut{end}{SPIRV}{end}".encode(code))
    log = logs.read(path)
    assert log.lines == (
        Line("a.log:1", "Loading transformer"), Line("a.log:3", "ümlaut"), Line("a.log:4", SPIRV),
    )  # fmt: skip
    assert [match.fault.id for match in library.name(log)] == ["bf16-spirv-on-load"]


def test_a_bar_drawn_in_place_and_colours(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"steps: 0%| | 0/9\rsteps: 50%|# | 4/9 [00:01<\r\x1b[31merror: odd\x1b[0m\n")
    assert [line.text for line in logs.read(path).lines] == [
        "steps: 0%| | 0/9", "steps: 50%|# | 4/9 [00:01<", "error: odd",
    ]  # fmt: skip


@pytest.mark.parametrize("code", ["utf-8", "utf-16"])
def test_of_a_huge_log_the_head_and_the_tail(code: str, tmp_path: Path) -> None:
    """100 MB: what was loaded stands first, how it ended last; the middle is a hole in the file."""
    path = tmp_path / "a.log"
    head, tail = (
        "Loading transformer\nrunning training\n",
        "\nstep 9 loss: 0.4\nUR_RESULT_ERROR_DEVICE_LOST\n",
    )
    encoded = tail.encode(code).removeprefix("a".encode(code)[:2] if code == "utf-16" else b"")
    with path.open("wb") as handle:
        handle.write(head.encode(code))
        handle.seek(100 * 10**6 - len(encoded))
        handle.write(encoded)
    log = logs.read(path)
    assert log.lines[0] == Line("a.log:1", "Loading transformer")
    assert (
        log.lines[-1] == Line("a.log:end-2", "UR_RESULT_ERROR_DEVICE_LOST")
        or log.lines[-1].where == "a.log:end-1"
    )
    assert log.lines[-1].text == "UR_RESULT_ERROR_DEVICE_LOST"
    assert sum(len(line.text) for line in log.lines) < 10_000
    assert [match.fault.id for match in library.name(log)] == ["device-lost"]


def test_a_file_a_little_larger_than_its_head_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    lines = [f"line {number}" for number in range(1, 120_000)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert logs.HEAD < path.stat().st_size < logs.HEAD + logs.TAIL
    found = logs.read(path).lines
    assert len(found) == len(lines) and found[-1] == Line("a.log:119999", "line 119999")


@given(data=st.binary(max_size=400))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_log(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(data)
    log = logs.read(path, exit_code=1)
    assert all(line.text.strip() and "\n" not in line.text for line in log.lines)
    assert log.stage in logs.ORDER
    library.name(log)


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("fit 3/200  loss 0.4 (smooth 0.4)", "step"),
        ("steps:   0%|          | 0/1000 [00:00<?, ?it/s]", "start"),
        ("load the denoiser", "load"),
        ("trains     LoRA rank 16 on 40 linears", "adapter"),
        ("cache 3/20  ETA 4 s", "encode"),
        ("v1: completed, stopped at step 200 as planned", "done"),
        ("a line about nothing", "start"),
    ],
)
def test_stages(text: str, stage: str) -> None:
    assert logs.Log(lines=(Line("a:1", text),)).stage == stage
