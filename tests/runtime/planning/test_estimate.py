from dataclasses import replace
from typing import Any

import pytest

from runtime.memory import spans
from runtime.planning import activations, architecture, estimate
from runtime.planning.estimate import Settings, Work

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


CACHED = replace(NF4, cached_modulation=True)
TWO = replace(EDIT1024, image_tokens=12288)
MEASURED: list[tuple[Settings, dict[str, Any], Work, float]] = [
    (PLAIN, {}, EDIT384, 39.57),
    (PLAIN, {"checkpointing": 6}, EDIT384, 40.06),
    (PLAIN, {}, EDIT1024, 42.61),
    (PLAIN, {"checkpointing": "selective"}, EDIT1024, 45.55),
    (PLAIN, {}, replace(TWO, batch_size=2), 51.00),
    (PLAIN, {"cached_modulation": True}, EDIT384, 26.88),
    (PLAIN, {"cached_modulation": True, "streamed_blocks": 20}, EDIT1024, 22.27),
    (NF4, {}, EDIT384, 11.48),
    (NF4, {}, TWO, 16.55),
    (NF4, {"checkpointing": False, "adapter_parameters": 11_796_480}, EDIT384, 24.38),
    (NF4, {"adapter_parameters": 188_743_680}, replace(EDIT384, batch_size=2), 14.53),
    (CACHED, {"checkpointing": "selective"}, replace(EDIT384, batch_size=2), 11.03),
    (CACHED, {}, EDIT1024, 11.22),
    (CACHED, {"checkpointing": 2}, TWO, 12.30),
    (CACHED, {"streamed_blocks": 30}, EDIT384, 5.23),
    (CACHED, {"streamed_blocks": 20, "checkpointing": "selective"}, EDIT1024, 12.26),
]


@pytest.mark.parametrize(("settings", "changes", "work", "peak"), MEASURED)
def test_fit_agrees_with_what_was_measured(
    real: architecture.Architecture, settings: Settings, changes: dict[str, Any], work: Work, peak: float
) -> None:
    """Peak allocated on one H200, torch 2.11, random weights (benchmarks/memory_plan.py); the bar is a tenth."""
    phase = estimate.fit_phase(real, replace(settings, **changes), work)
    assert phase.peak_gib == pytest.approx(peak, rel=0.025)
    assert phase.largest in ("denoiser", "activations")


def test_activations_without_checkpointing_agree_with_what_was_measured(
    real: architecture.Architecture,
) -> None:
    """The same with ten blocks of the sixty; the gradients, 0.03 GiB, are in the figure."""
    ten = replace(real, denoiser=replace(real.denoiser, layers=10))
    phase = estimate.fit_phase(ten, replace(PLAIN, checkpointing=False), EDIT384)
    assert phase.components_gib["activations"] == pytest.approx(2.50, rel=0.05)


@pytest.mark.parametrize(
    ("mode", "side", "encode", "decode"),
    [
        ("exact", 1024, 2.12, 2.31),
        ("exact", 2048, 7.77, 8.52),
        ("folded", 1024, 1.22, 1.41),
        ("folded", 2048, 4.63, 5.38),
        ("tiled", 1024, 0.41, 0.51),
        ("tiled", 2048, 0.44, 0.56),
    ],
)
def test_vae_agrees_with_what_was_measured(
    real: architecture.Architecture, mode: str, side: int, encode: float, decode: float
) -> None:
    """One H200, bf16, peak with the weights."""
    settings = replace(PLAIN, vae=mode)
    weights = activations.vae_weights(real, settings, 2)
    pixels = side * side
    found = [
        (weights + count(real, settings, pixels, 2)) / 2**30
        for count in (activations.encode_bytes, activations.decode_bytes)
    ]
    assert found == pytest.approx([encode, decode], rel=0.04)


def test_the_cache_phase_encodes_a_batch_and_decodes_one(real: architecture.Architecture) -> None:
    alone = replace(PLAIN, text_encoder_device="cpu")
    work = replace(EDIT384, target_pixels=2**20)
    one, four = (
        estimate.cache_phase(real, replace(alone, encoded_at_once=count), work).components_gib
        for count in (1, 4)
    )
    assert set(one) == {"vae", "activations", "workspace"}
    assert one["activations"] == pytest.approx(2.31 - 0.24, rel=0.02), "decoding"
    assert four["activations"] == pytest.approx(4 * (2.12 - 0.24), rel=0.02), "encoding"


def test_adapter_gradient_and_state_are_four_four_and_eight_bytes(real: architecture.Architecture) -> None:
    components = estimate.fit_phase(real, PLAIN, EDIT384).components_gib
    unit = PLAIN.adapter_parameters / 2**30
    assert [components[name] / unit for name in ("adapter", "gradients", "optimizer")] == [4, 4, 8]


def test_painting_in_the_fit_is_counted_where_it_is_the_peak(real: architecture.Architecture) -> None:
    """At 1024 px the decode takes 2.1 GiB and the VAE 0.24, half of a checkpointed bf16 step (4.2)."""
    painting = replace(PLAIN, samples=True)
    small = estimate.fit_phase(real, painting, EDIT384)
    without = estimate.fit_phase(real, PLAIN, EDIT384)
    longer = replace(EDIT1024, text_tokens=1400)
    assert estimate.fit_phase(real, painting, longer) == estimate.fit_phase(real, PLAIN, longer)
    wide = replace(EDIT384, painted_pixels=2**21, painted_tokens=8592)
    phase = estimate.fit_phase(real, painting, wide)
    assert phase.resident_gib == small.resident_gib == without.resident_gib, "the VAE does not stay"
    assert phase.components_gib["activations"] == pytest.approx(2 * 2.07 + 0.24, rel=0.02)
    assert estimate.fit_phase(real, PLAIN, wide) == without, "where nothing is painted nothing is counted"


def test_a_vae_elsewhere_takes_nothing_of_the_fit(real: architecture.Architecture) -> None:
    wide = replace(EDIT384, painted_pixels=2**22, painted_tokens=8592)
    here, there = (
        estimate.fit_phase(real, replace(PLAIN, samples=True, vae_device=where), wide).components_gib
        for where in ("cuda", "cpu")
    )
    assert here["activations"] == pytest.approx(8.52, rel=0.02)
    step = estimate.fit_phase(real, PLAIN, wide).components_gib["activations"]
    assert there["activations"] == step, "more than the denoiser at that size, 0.88 GiB"


def test_validation_counts_a_prompt_of_its_own_size(real: architecture.Architecture) -> None:
    wide = replace(EDIT384, painted_pixels=2**20)
    phases = [estimate.validate_phase(real, PLAIN, work) for work in (EDIT384, wide)]
    assert phases[1].components_gib["activations"] == pytest.approx(2.07, rel=0.02)
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


def test_an_encoder_elsewhere_is_in_host_memory(real: architecture.Architecture) -> None:
    """One after the other: of those on the device the larger one counts."""
    here = estimate.cache_phase(real, PLAIN, EDIT384)
    there = estimate.cache_phase(real, replace(PLAIN, text_encoder_device="cpu"), EDIT384)
    assert here.components_gib["text_encoder"] == pytest.approx(14.4, abs=0.1)
    assert "vae" not in here.components_gib and "text_encoder" not in here.host_gib
    assert set(there.components_gib) == {"vae", "activations", "workspace"}
    assert there.host_gib["text_encoder"] == pytest.approx(14.4, abs=0.1) and there.host_gib["encoding"] > 0


def test_peak_is_the_sum_and_the_process_counts_on_a_cpu(real: architecture.Architecture) -> None:
    cpu = replace(PLAIN, device="cpu", precision="no", text_encoder_device="cpu", vae_device="cpu")
    for phase in estimate.phases(real, cpu, EDIT384).values():
        assert phase.components_gib["process"] == estimate.PROCESS_GIB
        assert phase.peak_gib == pytest.approx(sum(phase.components_gib.values()))
        assert phase.resident_gib == pytest.approx(phase.peak_gib - phase.components_gib["activations"])
        assert phase.components_gib[phase.largest] == max(phase.components_gib.values())
        assert phase.host_gib == {} and phase.reserve_gib == 0 and phase.needed_gib == phase.peak_gib


def test_an_accelerator_has_a_reserve_and_a_host(real: architecture.Architecture) -> None:
    for phase in estimate.phases(real, PLAIN, EDIT384).values():
        assert phase.host_gib["process"] == estimate.ACCELERATOR_PROCESS_GIB and phase.host_gib["loading"] > 0
        assert phase.reserve_gib == pytest.approx(
            estimate.RESERVE_SHARE * phase.peak_gib + estimate.CONTEXT_GIB
        )
        assert phase.needed_gib == phase.peak_gib + phase.reserve_gib
    recorded = estimate.fit_phase(real, replace(PLAIN, graphs=True), EDIT384)
    eager = estimate.fit_phase(real, PLAIN, EDIT384)
    assert recorded.peak_gib == eager.peak_gib
    assert recorded.reserve_gib - eager.reserve_gib == pytest.approx(eager.components_gib["activations"])


@pytest.mark.parametrize(("quantize", "saved"), [("none", 12.71), ("nf4", 3.32)])
def test_cached_modulation_leaves_a_third_of_the_weights_out(
    real: architecture.Architecture, quantize: str, saved: float
) -> None:
    """38.1 to 25.4 and 9.95 to 6.64 GiB resident on one H200."""
    settings = replace(PLAIN, quantize=quantize)
    live, table = (
        estimate.fit_phase(real, replace(settings, cached_modulation=on), replace(EDIT384, batch_size=2))
        for on in (False, True)
    )
    assert live.components_gib["denoiser"] - table.components_gib["denoiser"] == pytest.approx(
        saved, abs=0.01
    )
    assert table.components_gib["modulation_rows"] * 1024 == pytest.approx(2 * 4.25, abs=0.02), "MiB"
    assert "modulation_rows" not in live.components_gib


@pytest.mark.parametrize(
    ("mode", "units"),
    [(False, 60 * 17 + 9), ("selective", 2 * 60 - 1 + 17 + 9), (True, 60 + 17 + 9), (4, 15 + 68 + 9)],
)
def test_units_of_each_way_to_checkpoint(real: architecture.Architecture, mode: Any, units: float) -> None:
    assert activations.step_units(60, replace(PLAIN, checkpointing=mode), 1) == units


@pytest.mark.parametrize(
    ("attention", "batch", "kept"),
    [("fused", 2, 59), ("unmasked", 1, 59), ("unmasked", 2, 0), ("math", 1, 0)],
)
def test_no_output_of_plain_attention_is_kept(attention: str, batch: int, kept: int) -> None:
    every, selective = (
        activations.step_units(60, replace(PLAIN, checkpointing=mode, attention=attention), batch)
        for mode in (True, "selective")
    )
    assert selective - every == kept


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"compiled": True}, -4),
        ({"precision": "no"}, -4),
        ({"targets": frozenset({"attention", "mlp"})}, 5),
        ({"targets": frozenset({"attention", "mlp", "modulation"})}, 9),
        ({"dora": True}, 7),
        ({"dropout": True}, 6),
    ],
)
def test_what_a_block_keeps_depends_on_what_is_trained(change: dict[str, Any], more: float) -> None:
    assert activations.kept_units(replace(PLAIN, **change)) - activations.kept_units(PLAIN) == more


@pytest.mark.parametrize(
    ("attention", "batch", "counted"),
    [("fused", 1, 0), ("unmasked", 1, 0), ("unmasked", 2, 2), ("math", 1, 1)],
)
def test_plain_attention_holds_a_matrix_of_scores(
    real: architecture.Architecture, attention: str, batch: int, counted: int
) -> None:
    work = replace(EDIT384, batch_size=batch)
    plain, other = (
        estimate.fit_phase(real, replace(PLAIN, attention=kind), work).components_gib["activations"]
        for kind in ("fused", attention)
    )
    assert other - plain == pytest.approx(2.5 * counted * 24 * 2416**2 * 4 / 2**30)


@pytest.mark.parametrize("mode", [False, True, "selective", 3, 6])
@pytest.mark.parametrize("count", [1, 2, 20, 59, 60])
def test_streamed_blocks_are_counted_as_they_are_held(
    real: architecture.Architecture, mode: Any, count: int
) -> None:
    pytest.importorskip("torch")
    from runtime.memory import offload

    settings = replace(PLAIN, checkpointing=mode, streamed_blocks=count)
    none, some = (estimate.fit_phase(real, replace(settings, streamed_blocks=n), EDIT384) for n in (0, count))
    block = 2 * (real.denoiser.block().packable + real.denoiser.block().plain)
    at_once = offload.together(offload.picked(60, count), 60, settings.group(60))
    held = offload.held(block, count, at_once)
    gone = (none.components_gib["denoiser"] - some.components_gib["denoiser"]) * 2**30
    assert gone == pytest.approx(max(0, count * block - held.device))
    assert some.host_gib["streamed_blocks"] * 2**30 == held.host


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("count", [0, 30, 60])
def test_linears_that_nf4_leaves_plain_are_counted_so(
    real: architecture.Architecture, table: bool, count: int
) -> None:
    """The whole of block 1, which is streamed of 30, and modulations of block 2, which is not."""
    kept = real.denoiser.kept(["transformer_blocks.1.*", "*.2.???_mod.1", "proj_out", "nothing"])
    assert len(kept) == 14 + 2
    settings = replace(NF4, cached_modulation=table, streamed_blocks=count)
    none, some = (
        estimate.fit_phase(real, replace(settings, kept=names), EDIT384) for names in (frozenset(), kept)
    )
    wider = 2 - estimate.NF4_BYTES
    first = real.denoiser.block(modulation=not table).packable * wider
    second = 0 if table else 2 * 6 * 3072**2 * wider
    more = {0: first + second, 30: 2 * first + second, 60: 2 * first}[count]  # two blocks are in flight
    assert 2**30 * (some.components_gib["denoiser"] - none.components_gib["denoiser"]) == pytest.approx(more)
    if count:
        numbers = real.denoiser.block(modulation=not table)
        sizes = [
            round(numbers.packable * estimate.NF4_BYTES + numbers.plain * 2 + more)
            for more in (first, *([second] if count == 60 else []), *[0.0] * (count - 1 - (count == 60)))
        ]
        sizes = sizes if count == 30 else [sizes[2], *sizes[:2], *sizes[3:]]
        assert some.host_gib["streamed_blocks"] * 2**30 == spans.host_bytes(sizes)
    plain = replace(settings, quantize="none")
    assert estimate.fit_phase(real, replace(plain, kept=kept), EDIT384) == estimate.fit_phase(
        real, plain, EDIT384
    )


def test_gradients_and_inputs_of_blocks_are_there_together_only_in_an_accumulation(
    real: architecture.Architecture,
) -> None:
    one = replace(PLAIN, adapter_parameters=10**8)
    alone, several = (
        estimate.fit_phase(real, replace(one, accumulation=count), EDIT384).peak_gib for count in (1, 2)
    )
    assert several - alone == pytest.approx(4 * 10**8 / 2**30)


def test_a_packed_text_encoder_is_smaller_by_its_linears(real: architecture.Architecture) -> None:
    sizes = [
        estimate.cache_phase(real, settings, EDIT384).components_gib["text_encoder"]
        for settings in (PLAIN, replace(PLAIN, text_encoder_quantize="nf4"))
    ]
    saved = real.text_encoder.quantizable * (2 - estimate.NF4_BYTES) / 2**30
    assert sizes[0] - sizes[1] == pytest.approx(saved) and 4.3 < sizes[1] < 5.3
    itself = replace(real, text_encoder=replace(real.text_encoder, packed=True))
    assert estimate.cache_phase(itself, PLAIN, EDIT384).components_gib["text_encoder"] == sizes[1]


def test_linears_of_the_text_encoder_that_nf4_leaves_plain_are_counted_so(
    real: architecture.Architecture,
) -> None:
    """But for those that NF4 takes of no base: rows of 3420 are no whole blocks."""
    kept = frozenset({"model.layers.3.mlp.up_proj", "visual.merger.mlp.2", "visual.blocks.0.mlp.down_proj"})
    nf4 = replace(PLAIN, text_encoder_quantize="nf4", text_encoder_dtype="fp32")
    itself = replace(real, text_encoder=replace(real.text_encoder, packed=True))
    for base, settings in ((real, nf4), (itself, replace(nf4, text_encoder_quantize="none"))):
        none, some = (
            estimate.cache_phase(base, replace(settings, text_encoder_kept=names), EDIT384)
            for names in (frozenset(), kept)
        )
        more = (3584 * 18944 + 5120 * 3584) * (4 - estimate.NF4_BYTES)
        grown = some.components_gib["text_encoder"] - none.components_gib["text_encoder"]
        assert grown * 2**30 == pytest.approx(more)
    plain = replace(PLAIN, text_encoder_kept=kept)
    assert estimate.cache_phase(real, plain, EDIT384) == estimate.cache_phase(real, PLAIN, EDIT384)


@pytest.mark.parametrize(("dtype", "copies"), [("bf16", 1), ("fp32", 3)])
def test_its_embedding_passes_through_host_memory(
    real: architecture.Architecture, dtype: str, copies: int
) -> None:
    """As it is in the file, and once more where it must become another dtype; whatever else is packed."""
    for quantize in ("none", "nf4"):
        settings = replace(PLAIN, text_encoder_dtype=dtype, text_encoder_quantize=quantize)
        host = estimate.cache_phase(real, settings, EDIT384).host_gib
        assert host["loading"] == pytest.approx(copies * 152064 * 3584 * 2 / 2**30)
