"""What a plan of compiled blocks without checkpointing rests on: they keep no more than eager ones."""

import json
from typing import Any

import kept
import pytest


# torch's own, while it divides what it traced.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_keep_less_than_eager_ones(call: Any, capsys: Any) -> None:
    call(kept.main, "--heads", "2", "--size", "32", "32", "--quantize", "nf4")
    line = json.loads(capsys.readouterr().out)
    assert line["share"] == line["compiled"] / line["eager"] and 0.5 < line["share"] < 0.9
