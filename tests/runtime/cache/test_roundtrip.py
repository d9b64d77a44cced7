"""Evidence that the cache is what it says: some samples encoded again and decoded."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime import files
from runtime.cache import encode, roundtrip
from runtime.cache.encode import Encoded


def compare(job: Any, number: int = 0) -> dict[str, Any]:
    encoders, want = encode.load(job.family, job.model, job.config), job.wants[number]
    return roundtrip.compare(job, encoders, want, roundtrip.ask_again(job, encoders, want))


def test_it_follows_the_schema(lab: Any, held: Any, conforms: Any) -> None:
    document = files.read_json(lab.workspace.evidence_path(roundtrip.NAME))
    conforms(document, "evidence")
    assert document["complete"] is True
    assert document["inputs"]["files"] == {"cache/manifest.json": files.file_digest(held.store.manifest_path)}
    data = document["data"]
    assert data["manifest_digest"] == files.document_digest(held.store.manifest()["entries"])
    assert data["tolerance"] == roundtrip.TOLERANCE
    assert len(data["samples"]) == len({sample["id"] for sample in data["samples"]}) == roundtrip.SAMPLES
    for sample in data["samples"]:
        assert max(sample["embeds_error"], sample["latents_error"]) == 0.0
        assert 0.0 <= sample["embeds_rounding"] < 1e-5
        assert sample["decoded_psnr_db"] > 25  # the embedded VAE reaches 35 on such pictures


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda mine, other: {**mine, "prompt_embeds": other["prompt_embeds"]}, "embeds_error"),
        (lambda mine, other: {**mine, "target": other["target"]}, "latents_error"),
        (lambda mine, other: {**mine, "control_0": other["control_0"]}, "latents_error"),
        (lambda mine, other: {**mine, "target": mine["target"] * 0.5 + 0.1}, "latents_error"),
    ],
)
def test_an_entry_with_other_tensors_is_told(lab: Any, spoil: Any, error: str) -> None:
    """Whole, listed, of the right shape, and wrong: what digests alone can't see."""
    job = lab.job()
    assert max(compare(job)["embeds_error"], compare(job)["latents_error"]) == 0.0
    prompts = [want.document["prompt"] for want in job.wants]
    same = next(i for i, prompt in enumerate(prompts) if i and prompt == prompts[0])
    mine, other = (
        {name: t.clone() for name, t in job.store.read(job.wants[i].folder).items()} for i in (0, same)
    )
    job.store.write(job.wants[0], Encoded(tensors=spoil(mine, other)))
    found = compare(job)
    errors = ("embeds_error", "latents_error")
    assert [name for name in errors if found[name] > roundtrip.TOLERANCE] == [error]


def test_latents_of_another_picture_decode_far_from_the_pixels(lab: Any) -> None:
    job = lab.job()
    right = compare(job)["decoded_psnr_db"]
    mine = {name: t.clone() for name, t in job.store.read(job.wants[0].folder).items()}
    job.store.write(job.wants[0], Encoded(tensors={**mine, "target": -mine["target"]}))
    assert compare(job)["decoded_psnr_db"] < 12 < 25 < right


def test_a_mask_is_part_of_it(lab: Any) -> None:
    from PIL import Image

    Image.new("L", (64, 64), 0).save(lab.root / "dataset" / "control_images" / "p0_mask.png")
    lab.scan()
    lab.cache()
    job = lab.job()
    number = next(i for i, want in enumerate(job.wants) if want.id == "p0")
    assert compare(job, number)["latents_error"] == 0.0
    mine = {name: t.clone() for name, t in job.store.read(job.wants[number].folder).items()}
    job.store.write(job.wants[number], Encoded(tensors={**mine, "mask": torch.ones(8, 8)}))
    assert compare(job, number)["latents_error"] > roundtrip.TOLERANCE


@pytest.mark.parametrize(("dtype", "at_once"), [("bf16", 4), ("fp32", 4), ("bf16", 1)])
def test_the_rounding_is_what_company_makes_of_an_answer(
    lab: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, at_once: int
) -> None:
    job = lab.job({"cache.dtypes.text_encoder": dtype, "cache.batch_size": at_once})
    encoders, want = encode.load(job.family, job.model, job.config), job.wants[0]
    asked = []
    honest = job.family.encode_prompts

    def in_company(encoders: Any, asks: Any, max_tokens: int) -> Any:
        """bf16 kernels of another shape, of an encoder that makes much of that."""
        asked.append(len(asks))
        found = honest(encoders, asks, max_tokens)
        if dtype == "bf16" and len(asks) > 1:
            found = [replace(one, embeds=one.embeds * 1.125) for one in found]
        return found

    monkeypatch.setattr(
        type(job.family), "encode_prompts", lambda self, *given, **more: in_company(*given, **more)
    )
    again = roundtrip.ask_again(job, encoders, want)
    assert asked == ([1, 2] if at_once > 1 else [1])
    if dtype == "bf16" and at_once > 1:
        assert again.rounding == pytest.approx(0.125, abs=0.01)
    else:
        assert again.rounding < 1e-5


def test_it_is_made_again_when_the_cache_changed_or_it_was_not_finished(lab: Any) -> None:
    path = lab.workspace.evidence_path(roundtrip.NAME)
    before = files.read_json(path)
    lab.cache()
    assert files.read_json(path) == before
    lab.workspace.begin_evidence(roundtrip.NAME, "finetune cache")
    lab.cache()
    assert files.read_json(path)["complete"] is True
    lab.cache({"data.caption_dropout_rate": 0.1})
    assert files.read_json(path)["data"]["manifest_digest"] != before["data"]["manifest_digest"]
