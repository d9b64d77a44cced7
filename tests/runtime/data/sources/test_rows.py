import pytest

from runtime.data.sources.rows import Columns, choose, controls_among
from runtime.errors import DataError

CHOSEN = [
    (Columns(), "target", "caption", Columns(image="target", caption="caption")),
    (
        Columns(),
        "image control_10 control_2 control mask",
        "text id",
        Columns(image="image", controls=("control", "control_2", "control_10"), mask="mask", caption="text"),
    ),
    (Columns(), "Edited_Image Input_Image", "Edit_Prompt original_prompt",
     Columns(image="Edited_Image", controls=("Input_Image",), caption="Edit_Prompt")),
    (Columns(image="after"), "after image", "prompt", Columns(image="after", caption="prompt")),
    (Columns(controls=("image",)), "image output", "prompt",
     Columns(image="output", controls=("image",), caption="prompt")),
    (Columns(image="input"), "input source", "a text", Columns(image="input", controls=("source",), caption="text")),
    (Columns(image="x", controls=("z", "y"), mask="m", caption="c"), "x y z m target control", "c caption",
     Columns(image="x", controls=("z", "y"), mask="m", caption="c")),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "pictures", "texts", "expected"), CHOSEN)
def test_columns_by_request_then_by_name(
    asked: Columns, pictures: str, texts: str, expected: Columns
) -> None:
    assert choose(asked, pictures.split(), texts.split(), "here") == expected


REFUSED = [
    (Columns(), "image target", "text", "image and target could each be the target", "image_key"),
    (
        Columns(),
        "target control source",
        "text",
        "control and source could each be the control",
        "control_keys",
    ),
    (Columns(), "target control_1 control_01", "text", "control_1 and control_01", "control_keys"),
    (Columns(), "target mask mask_image", "text", "mask and mask_image", "mask_key"),
    (Columns(), "target", "text prompt", "prompt and text could each be the caption", "caption_key"),
    (Columns(), "before after", "text", "no column is known to be the target picture", "image_key"),
    (Columns(), "target", "words", "no column is known to be the caption", "caption_key"),
    (Columns(image="text"), "target", "text", "image_key 'text' is no column of pictures", "image_key"),
    (Columns(controls=("control", "nope")), "target control", "text", "control_keys 'nope'", "control_keys"),
    (Columns(mask="nope"), "target", "text", "mask_key 'nope'", "mask_key"),
    (Columns(caption="target"), "target", "text", "caption_key 'target' is no column of text", "caption_key"),
]


@pytest.mark.parametrize(("asked", "pictures", "texts", "message", "key"), REFUSED)
def test_what_is_open_is_asked_for(asked: Columns, pictures: str, texts: str, message: str, key: str) -> None:
    with pytest.raises(DataError) as caught:
        choose(asked, pictures.split(), texts.split(), "set/a.parquet")
    assert message in caught.value.message and key in caught.value.remedy
    assert caught.value.message.startswith("set/a.parquet: ")
    listed = f"picture columns: {', '.join(pictures.split())}; the text columns: {', '.join(texts.split())}"
    assert listed in caught.value.message


def test_numbered_controls_stand_alone_and_start_anywhere() -> None:
    assert controls_among(["control_image_3", "control_0", "controls_1"]) == ("control_0", "control_image_3")
