from dataclasses import replace
from typing import Any

import pytest

from runtime.memory import architecture, estimate
from runtime.memory.estimate import Settings, Work

PLAIN = Settings(
    device="cuda",
    quantize="none",
    precision="bf16",
    checkpointing=True,
    text_encoder_device="cuda",
    vae_device="cuda",
    adapter_parameters=23_592_960,
    optimizer="torch.optim.AdamW",
)
NF4 = replace(PLAIN, quantize="nf4")
EDIT384 = Work(
    target_pixels=384 * 672, control_pixels=384 * 672, text_tokens=400, image_tokens=2016, batch_size=1
)
EDIT1024 = Work(target_pixels=2**20, control_pixels=2**20, text_tokens=400, image_tokens=8192, batch_size=1)


@pytest.fixture
def real(make_model: Any) -> architecture.Architecture:
    return architecture.read(make_model(real=True))


@pytest.mark.parametrize(
    ("settings", "work", "resident", "peak"),
    [
        (PLAIN, EDIT384, 38.1, 39.84),
        (PLAIN, EDIT1024, 38.1, 42.87),
        (NF4, EDIT384, 9.95, 11.72),
    ],
)
def test_fit_agrees_with_what_was_measured(
    real: architecture.Architecture, settings: Settings, work: Work, resident: float, peak: float
) -> None:
    """One H200, torch 2.11, random weights at real size, r16 on the attention of both streams, no autocast."""
    phase = estimate.fit_phase(real, replace(settings, adapter_parameters=47_185_920), work)
    assert phase.components_gib["denoiser"] == pytest.approx(resident, rel=0.02)
    assert phase.peak_gib == pytest.approx(peak, rel=0.03)
    assert phase.largest == "denoiser"


def test_activations_without_checkpointing_agree_with_what_was_measured(
    real: architecture.Architecture,
) -> None:
    """The same with ten blocks of the sixty; the gradients, 0.03 GiB, are in the figure."""
    ten = replace(real, denoiser=replace(real.denoiser, layers=10))
    phase = estimate.fit_phase(ten, replace(PLAIN, checkpointing=False), EDIT384)
    assert phase.components_gib["activations"] == pytest.approx(2.50, rel=0.05)


@pytest.mark.parametrize(("side", "encode", "decode"), [(1024, 2.88, 4.37), (2048, 10.80, 16.78)])
def test_vae_agrees_with_what_was_measured(
    real: architecture.Architecture, side: int, encode: float, decode: float
) -> None:
    work = replace(EDIT384, target_pixels=side * side)
    settings = replace(PLAIN, text_encoder_device="cpu")
    assert estimate.cache_phase(real, settings, work).peak_gib == pytest.approx(encode, rel=0.02)
    validate = estimate.validate_phase(real, PLAIN, work)
    assert validate.components_gib["activations"] + validate.components_gib["vae"] == pytest.approx(
        decode, rel=0.02
    )


def test_adapter_gradient_and_state_are_four_four_and_eight_bytes(real: architecture.Architecture) -> None:
    components = estimate.fit_phase(real, PLAIN, EDIT384).components_gib
    unit = PLAIN.adapter_parameters / 2**30
    assert [components[name] / unit for name in ("adapter", "gradients", "optimizer")] == [4, 4, 8]


def test_painting_in_the_fit_is_counted_where_it_is_the_peak(real: architecture.Architecture) -> None:
    """At 1024 px the decode takes 4.1 GiB and the VAE 0.24, about as much as a checkpointed bf16 step (4.2)."""
    painting = replace(PLAIN, samples=True)
    small = estimate.fit_phase(real, painting, EDIT384)
    without = estimate.fit_phase(real, PLAIN, EDIT384)
    longer = replace(EDIT1024, text_tokens=1400)
    assert estimate.fit_phase(real, painting, longer) == estimate.fit_phase(real, PLAIN, longer)
    wide = replace(EDIT384, painted_pixels=2**21, painted_tokens=8592)
    phase = estimate.fit_phase(real, painting, wide)
    assert phase.resident_gib == small.resident_gib == without.resident_gib, "the VAE does not stay"
    assert phase.components_gib["activations"] == pytest.approx(2 * 4.13 + 0.24, rel=0.02)
    assert estimate.fit_phase(real, PLAIN, wide) == without, "where nothing is painted nothing is counted"


def test_a_vae_elsewhere_takes_nothing_of_the_fit(real: architecture.Architecture) -> None:
    wide = replace(EDIT384, painted_pixels=2**22, painted_tokens=8592)
    here, there = (
        estimate.fit_phase(real, replace(PLAIN, samples=True, vae_device=where), wide).components_gib
        for where in ("cuda", "cpu")
    )
    assert here["activations"] == pytest.approx(16.78, rel=0.02)
    assert there["activations"] == pytest.approx(8592 * 2 * 3072 * 26 / 2**30), "the denoiser at that size"


def test_validation_counts_a_prompt_of_its_own_size(real: architecture.Architecture) -> None:
    wide = replace(EDIT384, painted_pixels=2**20)
    phases = [estimate.validate_phase(real, PLAIN, work) for work in (EDIT384, wide)]
    assert phases[1].components_gib["activations"] == pytest.approx(4.13, rel=0.02)
    assert phases[0].components_gib["activations"] < 1.5


@pytest.mark.parametrize(
    ("change", "component", "grows"),
    [
        ({"quantize": "nf4"}, "denoiser", False),
        ({"precision": "no"}, "denoiser", True),
        ({"checkpointing": False}, "activations", True),
        ({"optimizer": "bitsandbytes.optim.Adam8bit"}, "optimizer", False),
        ({"optimizer": "torch.optim.SGD"}, "optimizer", False),
        ({"adapter_parameters": 10**9}, "adapter", True),
    ],
)
def test_each_setting_moves_its_component(
    real: architecture.Architecture, change: dict[str, Any], component: str, grows: bool
) -> None:
    before = estimate.fit_phase(real, PLAIN, EDIT384).components_gib[component]
    after = estimate.fit_phase(real, replace(PLAIN, **change), EDIT384).components_gib[component]
    assert (after > before) is grows and after != before


@pytest.mark.parametrize("change", [{"batch_size": 2}, {"text_tokens": 1600}, {"image_tokens": 8192}])
def test_more_work_needs_more(real: architecture.Architecture, change: dict[str, Any]) -> None:
    before = estimate.fit_phase(real, PLAIN, EDIT384)
    after = estimate.fit_phase(real, PLAIN, replace(EDIT384, **change))
    assert after.peak_gib > before.peak_gib and after.resident_gib == before.resident_gib


def test_encoder_on_another_device_takes_nothing_here(real: architecture.Architecture) -> None:
    here = estimate.cache_phase(real, PLAIN, EDIT384).components_gib
    there = estimate.cache_phase(real, replace(PLAIN, text_encoder_device="cpu"), EDIT384).components_gib
    assert here["text_encoder"] == pytest.approx(15.4, abs=0.1)
    assert "text_encoder" not in there and "vae" in there


def test_peak_is_the_sum_and_the_process_counts_on_a_cpu(real: architecture.Architecture) -> None:
    cpu = replace(PLAIN, device="cpu", precision="no", text_encoder_device="cpu", vae_device="cpu")
    for phase in estimate.phases(real, cpu, EDIT384).values():
        assert phase.components_gib["process"] == estimate.PROCESS_GIB
        assert phase.peak_gib == pytest.approx(sum(phase.components_gib.values()))
        assert phase.resident_gib == pytest.approx(phase.peak_gib - phase.components_gib["activations"])
        assert phase.components_gib[phase.largest] == max(phase.components_gib.values())


def test_a_packed_text_encoder_is_smaller_by_its_linears(real: architecture.Architecture) -> None:
    sizes = [
        estimate.cache_phase(real, settings, EDIT384).components_gib["text_encoder"]
        for settings in (PLAIN, replace(PLAIN, text_encoder_quantize="nf4"))
    ]
    saved = real.text_encoder.quantizable * (2 - estimate.NF4_BYTES) / 2**30
    assert sizes[0] - sizes[1] == pytest.approx(saved) and 5.3 < sizes[1] < 6.3
