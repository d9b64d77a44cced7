"""`finetune sample`: one's own picture and prompt; what can't be is said."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime import cli


def sample(lab: Any, *line: str) -> int:
    picture = lab.root / "dataset" / "control_images" / "p0.png"
    wish = [
        "sample",
        "--workspace",
        str(lab.root),
        "--prompt",
        "paint the circle red",
        "--image",
        str(picture),
    ]
    return cli.main([*wish, "--out", str(lab.root / "out.png"), *line])


def pixels(lab: Any) -> Any:
    with Image.open(lab.root / "out.png") as image:
        return np.asarray(image)


def test_base_and_adapter_start_from_the_same_noise(lab: Any) -> None:
    lab.fit()
    assert sample(lab) == 0
    adapter = pixels(lab)
    assert sample(lab) == 0 and np.array_equal(adapter, pixels(lab)), "the same wish gives the same picture"
    assert sample(lab, "--checkpoint", "none") == 0
    assert adapter.shape == (64, 64, 3) and not np.array_equal(adapter, pixels(lab))
    assert sample(lab, "--seed", "7") == 0 and not np.array_equal(adapter, pixels(lab))


def test_another_size(lab: Any) -> None:
    lab.configure()
    assert sample(lab, "--checkpoint", "none", "--size", "32", "96") == 0
    assert pixels(lab).shape == (32, 96, 3)


def test_a_prompt_alone_is_painted(lab: Any) -> None:
    lab.configure()
    line = ["--prompt", "a red circle", "--checkpoint", "none", "--out", str(lab.root / "out.png")]
    assert cli.main(["sample", "--workspace", str(lab.root), *line]) == 0
    assert pixels(lab).shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--checkpoint", "none", "--size", "60", "64"), "multiples of 16"),
        (("--checkpoint", "none", "--image", "nowhere.png"), "no such file"),
        (("--checkpoint", "none", "--image", "SECOND"), "takes 0 to 1"),
        ((), "no full run"),
    ],
)
def test_what_cannot_be_is_said(lab: Any, capsys: Any, line: tuple[str, ...], said: str) -> None:
    lab.configure()
    second = str(lab.root / "dataset" / "control_images" / "p1.png")
    assert sample(lab, *(second if part == "SECOND" else part for part in line)) == 1
    assert said in capsys.readouterr().err
