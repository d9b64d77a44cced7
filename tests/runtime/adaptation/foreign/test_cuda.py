"""What knows CUDA only, in a labelled sample: precision and recall, and single cases."""

import ast
import re
from pathlib import Path

import pytest

from runtime.adaptation.foreign import cuda, questions

CORPUS = (Path(__file__).parent / "corpus_cuda.txt").read_text(encoding="utf-8")
LABEL = re.compile(r"#([+?-]) ([a-z-]+)$")


def found_in(source: str) -> list[tuple[int, str]]:
    return [(item.line, item.kind) for item in cuda.scan(ast.parse(source), source.splitlines())]


def labelled(sign: str) -> set[tuple[int, str]]:
    hits = ((number, LABEL.search(line)) for number, line in enumerate(CORPUS.splitlines(), 1))
    return {(number, hit[2]) for number, hit in hits if hit and hit[1] in sign}


def test_the_labelled_sample_is_found_line_by_line() -> None:
    assert set(found_in(CORPUS)) == labelled("+-")


def test_precision_and_recall() -> None:
    """Of 46 lines that know CUDA only 43 are found; of 44 findings 43 are right. 175 lines of code are free of it."""
    found, true = set(found_in(CORPUS)), labelled("+?")
    right = found & true
    assert (len(right), len(found), len(true)) == (43, 44, 46)
    assert len(right) / len(found) > 0.97 and len(right) / len(true) > 0.93
    code = [line for line in CORPUS.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) - len(true) == 175


def test_every_kind_is_in_the_sample_and_has_its_mend() -> None:
    assert {kind for _, kind in labelled("+")} == set(cuda.MEND)


def test_the_code_of_a_finding() -> None:
    source = "def f():\n    torch.cuda.synchronize()  # " + "x" * 300 + "\n"
    (item,) = cuda.scan(ast.parse(source), source.splitlines())
    assert item.code == ("torch.cuda.synchronize()  # " + "x" * 300)[: cuda.CODE_MAX] and item.line == 2


@pytest.mark.parametrize(
    ("test", "answer"),
    [
        ("torch.cuda.is_available()", (True, False)),
        ("not torch.cuda.is_available()", (False, True)),
        ("device.type == 'cuda'", (True, False)),
        ("'cuda' != device", (False, True)),
        ("device in ('cuda', 'xpu')", (False, True)),
        ("device == 'cuda:0' and rank > 0", (True, False)),
        ("device == 'cuda' or rank > 0", (False, False)),
        ("not (device == 'cuda' or rank > 0)", (False, False)),
        ("not cuda or rank > 0", (False, True)),
        ("torch.xpu.is_available()", (False, True)),
        ("hasattr(torch, 'xpu')", (False, True)),
        ("(name := args.use_cuda)", (True, False)),
        ("x.is_cuda", (True, False)),
        ("device.startswith('cuda')", (True, False)),
        ("cuda_state is not None", (True, False)),
        ("cuda_state is None", (False, True)),
        ("torch.cuda.device_count() > 1", (True, False)),
        ("device.type == 'cpu'", (False, False)),
        ("done", (False, False)),
        ("f()()", (False, False)),
    ],
)
def test_what_a_condition_says(test: str, answer: tuple[bool, bool]) -> None:
    assert questions.asks(ast.parse(test, mode="eval").body) == answer
