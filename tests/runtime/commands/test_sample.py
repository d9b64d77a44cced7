"""`finetune sample`: one's own picture and prompt; what can't be is said."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runtime import cli
from runtime.cache import encode
from runtime.inference.painter import Painter


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


def test_never_two_models_in_memory(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they make in turn is what both make together; a VAE comes only for pictures."""
    lab.configure()
    loaded: list[tuple[str, Any]] = []
    alone, painter, made = encode.load, Painter.__init__, list[list[str]]()

    def nothing_left() -> bool:
        return all(model() is None for _, model in loaded)

    def load(*given: Any, only: Any) -> Any:
        assert nothing_left()
        encoders = alone(*given, only=only)
        loaded.append((only, weakref.ref(getattr(encoders.pipeline, only))))
        return encoders

    def paint(self: Any, *given: Any) -> None:
        assert nothing_left()
        painter(self, *given)

    def both(*given: Any) -> Any:
        found = in_turn(*given)
        *model, want = given
        together = encode.encode(model[0], alone(*model), model[2], [want])[0]
        assert found.tensors.keys() == together.tensors.keys() and found.notes == together.notes
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in together.tensors.items())
        made.append(sorted(found.tensors))
        return found

    in_turn = encode.one_after_other
    monkeypatch.setattr(encode, "load", load)
    monkeypatch.setattr(Painter, "__init__", paint)
    monkeypatch.setattr(encode, "one_after_other", both)
    assert sample(lab, "--checkpoint", "none") == 0
    assert [name for name, _ in loaded] == ["text_encoder", "vae"]
    loaded.clear()
    line = ["--prompt", "a red circle", "--checkpoint", "none", "--out", str(lab.root / "out.png")]
    assert cli.main(["sample", "--workspace", str(lab.root), *line]) == 0
    assert [name for name, _ in loaded] == ["text_encoder"]
    assert made == [["control_0", "prompt_embeds"], ["prompt_embeds"]]


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
