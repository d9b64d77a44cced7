"""Which tests hold the faults that users of other trainers have reported, row by row.

A row's name is that of the project's collection of public reports, groups A to G: A words, masks and batches,
B controls, C images, captions and names, D caches, E optimizer, precision and memory, F saving and resuming,
G formats. Here is what is right, and the tests that fail where it is not.
"""

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
ROWS = (
    *("A1", "A2", "A5", "A7", "A8", "A10", "A12"),
    *("B1", "B3", "B5", "B7", "B9", "B11", "B13"),
    *("C1", "C3", "C5", "C7", "C9", "C11", "C13"),
    *("D1", "D3", "D5", "D7", "D9"),
    *("E1", "E3", "E5", "E8", "E10", "E12", "E14", "E16", "E18"),
    *("F1", "F3", "F5", "F7", "F9", "F11"),
    *("G1", "G3", "G5", "G7", "G9", "G11", "G13"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    right: str
    tests: tuple[str, ...]
    """File below tests/ and function of each."""
    absent: str = ""
    """What the row is about and is not here, and why."""


def at(path: str, *names: str) -> tuple[str, ...]:
    """Test functions of one file of tests/runtime/."""
    return tuple(f"runtime/{path}.py::test_{name}" for name in names)


def case(right: str, *tests: tuple[str, ...], absent: str = "") -> Case:
    return Case(right=right, tests=tuple(test for some in tests for test in some), absent=absent)


ENCODERS, PRECISION = "families/test_qwen_image_edit_encoders", "training/test_precision"
MIXED = at("training/test_mixed", "each_sample_is_trained_as_often_as_asked_with_what_is_its_own")
REFUSED = at("config/test_load", "what_this_trainer_does_not_have_is_refused_by_name")

CASES: dict[str, Case] = {
    "A1": case(
        "what lies under a mask never changes an answer, of the denoiser or of the text encoder",
        at(
            "training/test_batches",
            "what_lies_under_the_mask_changes_nothing",
            "a_padded_batch_answers_as_each_sample_alone_would",
        ),
        at(ENCODERS, "padding_never_reaches_an_embedding", "a_batch_is_what_each_prompt_gets_alone"),
    ),
    "A2": case(
        "captions of unequal length are padded to the longest and masked",
        at("families/test_base", "shorter_ones_are_padded_behind_and_masked"),
        MIXED,
    ),
    "A5": case(
        "captions of equal length take the path without a mask; the cost of one is stated in families/base.py",
        at("families/test_base", "equal_lengths_are_stacked_without_a_mask", "a_batch_of_one_has_no_mask"),
        at("training/test_batches", "captions_of_equal_length_need_no_mask"),
        at(ENCODERS, "prompts_of_one_length_are_not_masked"),
    ),
    "A7": case(
        "a caption over the limit is cut there, and what is cut is said with the sample's name",
        at("cache/test_encode", "a_caption_over_the_limit_names_the_sample_and_what_is_cut"),
        at(ENCODERS, "a_prompt_over_the_limit_is_cut_and_says_what_is_missing"),
    ),
    "A8": case(
        "each picture keeps its own caption, also beside class images and at several captions a sample",
        MIXED,
        at("cache/test_encode", "a_batch_equals_single_samples", "each_caption_of_several_has_its_embedding"),
        at("families/test_base", "row_keeps_its_own_caption_and_controls"),
    ),
    "A10": case(
        "each variant has its own template, and what is dropped of it is checked",
        at(
            ENCODERS,
            "each_form_of_the_prompt_has_its_tokens",
            "template_prefix_is_what_the_pipeline_drops",
            "one_prompt_is_bit_for_bit_that_of_diffusers_own_pipeline",
        ),
        at("families/test_registry", "detected_from_model_index"),
    ),
    "A12": case(
        "the text encoder sees a control at its variant's size: a megapixel, or 384 x 384 from 2509 on",
        at("cache/test_encode", "a_control_is_shown_at_its_familys_size"),
        at(ENCODERS, "a_picture_is_a_token_for_28_by_28_pixels"),
    ),
    "B1": case(
        "a control is its target's by the whole name",
        at(
            "data/sources/test_directory",
            "stems_that_begin_alike_keep_their_own_controls",
            "a_control_goes_to_the_longest_name_or_to_nobody",
        ),
        at("data/sources/test_layout", "stems_that_begin_alike_keep_their_own_controls"),
    ),
    "B3": case(
        "as many controls as the family takes, their number free from sample to sample",
        MIXED,
        at("cache/test_build", "a_second_control_is_refused_for_a_family_of_one"),
        at("planning/test_plan", "edit_plus_takes_several_controls"),
    ),
    "B5": case(
        "one control where several are allowed",
        MIXED,
        at("families/test_base", "controls_come_in_the_order_of_their_numbers"),
    ),
    "B7": case(
        "samples whose controls differ in size never share a micro-batch",
        MIXED,
        at("families/test_base", "samples_with_other_controls_do_not_go_into_one_batch"),
    ),
    "B9": case(
        "an edit model trains on samples without controls, alone or among others",
        MIXED,
        at("data/sources/test_directory", "without_a_control_folder_samples_are_target_only"),
        at("families/test_qwen_image_edit", "predict_has_the_shape_of_the_target"),
    ),
    "B11": case(
        "a target and a control of its size show the same part: equal pictures, equal latents",
        at(
            "data/test_buckets",
            "identical_target_and_control_give_identical_pixels",
            "a_control_over_its_target_shows_the_same_part",
        ),
        at(ENCODERS, "same_pictures_of_odd_size_get_the_same_latents"),
    ),
    "B13": case(
        "a mask of another size follows its target's crop",
        at(
            "data/test_buckets",
            "mask_of_another_size_lies_over_the_same_part",
            "mask_of_another_aspect_is_stretched_over_the_target",
        ),
        at("cache/test_encode", "a_mask_of_another_size_follows_the_crop_of_its_target"),
        at("training/test_batches", "masks_of_a_batch_lie_over_its_targets"),
    ),
    "C1": case(
        "all eight orientations come out upright, before a bucket is chosen",
        at("data/test_images", "photo_comes_out_upright", "every_mode_comes_out_upright"),
        at("data/test_reading", "holds_size_digest_and_upright_measure_of_each_file"),
    ),
    "C3": case(
        "captions of any editor are read, with a warning where it was a guess; what is no text is named",
        at("data/test_captions", "text_of_any_editor", "unusable_caption_is_named"),
    ),
    "C5": case(
        "equal names in two folders are two samples; two suffixes of one name are told",
        MIXED,
        at("data/test_reading", "several_sources_keep_their_names_apart"),
        at("data/sources/test_layout", "nothing_is_dropped_without_a_reason"),
        at("cache/test_key", "a_file_of_one_sample_rebuilds_it_alone_and_is_named"),
    ),
    "C7": case(
        "sizes at the edges of buckets are the same when planned, cached and trained",
        MIXED,
        at("data/test_buckets", "final_sizes", "sizes_are_those_that_the_gates_expect"),
    ),
    "C9": case(
        "a bucket with fewer samples than a batch is trained all the same",
        MIXED,
        at("data/test_order", "each_item_is_seen_exactly_its_views_in_batches_of_one_bucket"),
        at("training/test_batches", "an_epoch_has_every_training_sample_as_often_as_asked"),
    ),
    "C11": case(
        "every colour mode becomes three channels by a stated rule: background, scale, first frame",
        at(
            "data/test_images",
            "every_mode_is_flattened_or_keeps_its_alpha",
            "sixteen_bits_of_grey_are_scaled_not_cut",
            "first_frame_of_an_animation",
            "cmyk_jpeg",
        ),
    ),
    "C13": case(
        "each item is seen exactly its repeats in an epoch, however many workers read",
        at(
            "training/test_batches",
            "an_epoch_has_every_training_sample_as_often_as_asked",
            "workers_change_nothing",
        ),
        at("training/test_loop", "every_sample_comes_once_in_each_epoch"),
    ),
    "D1": case(
        "another text encoder, of another width or only other weights, is refused and rebuilt",
        at("cache/test_encode", "another_text_encoder_is_refused_then_rebuilt"),
        at("cache/test_key", "every_file_of_an_encoder_counts"),
    ),
    "D3": case(
        "the VAE gets -1 to 1, and a new version of the processing makes old entries stale",
        at("cache/test_encode", "grey_black_and_white_reach_the_vae_in_minus_one_to_one"),
        at("data/test_images", "pixels_are_what_the_vae_wants"),
        at(ENCODERS, "pixels_out_of_range_are_refused"),
        at("cache/test_key", "another_version_of_the_schema"),
    ),
    "D5": case(
        "a second run finds its own cache and does nothing",
        at(
            "cache/test_build",
            "caching_and_training_twice",
            "a_rerun_loads_no_model_opens_no_picture_and_writes_nothing",
        ),
    ),
    "D7": case(
        "a file is as large as its tensors, whatever batch they come from",
        at("cache/test_store", "a_view_is_saved_without_the_storage_behind_it"),
        at("cache/test_build", "what_an_entry_holds"),
    ),
    "D9": case(
        "a damaged entry is named and built again; files of others are never touched",
        at("cache/test_store", "faults"),
        at(
            "cache/test_build",
            "a_damaged_entry_is_named_and_built_again",
            "files_of_others_are_never_touched",
        ),
        at("training/test_session", "a_damaged_entry_is_found_before_the_first_step"),
    ),
    "E1": case(
        "small updates survive: trained weights are fp32, and bf16 weights can't be asked for",
        at("training/test_layers", "small_updates_survive_in_fp32_weights_only"),
        REFUSED,
        absent="full fine-tuning with bf16 weights, of an issue to come",
    ),
    "E3": case(
        "block swap is refused by name",
        REFUSED,
        absent="full fine-tuning and block swap, of issues to come",
    ),
    "E5": case(
        "recomputing activations, the one technique of its kind here, changes no bit of a gradient",
        at(PRECISION, "recomputing_activations_changes_no_gradient"),
        REFUSED,
        absent="block swap, of an issue to come",
    ),
    "E8": case(
        "a run whose adapter gets no gradient stops at its first step; else every lora_B moves in it",
        at("training/test_loop", "a_first_step_without_gradient_is_an_error"),
        at(PRECISION, "the_base_stays_as_it_was_while_every_lora_b_moves"),
    ),
    "E10": case(
        "base, adapter, activations and states have the precision that was asked for, and run.json says so",
        at(PRECISION, "precision_is_as_configured_and_recorded"),
        at("families/test_qwen_image_edit", "the_denoiser_is_frozen_and_of_the_asked_dtype"),
    ),
    "E12": case(
        "accumulated micro-batches are one large batch",
        at(
            "training/test_loop",
            "accumulation_equals_one_large_batch",
            "gradients_of_accumulation_equal_those_of_one_batch",
        ),
    ),
    "E14": case(
        "one process, whatever a launcher's variables say; more are refused by name",
        at("training/test_trackers", "a_launchers_variables_make_no_process_group"),
        REFUSED,
        absent="training on several devices, of an issue to come",
    ),
    "E16": case(
        "a parameter of the adapter costs 16 bytes, 10 with 8-bit states, and the plan counts them",
        at(PRECISION, "a_rank_costs_its_weights_gradients_and_states"),
        at("planning/test_estimate", "adapter_gradient_and_state_are_four_four_and_eight_bytes"),
        at("training/test_layers", "activations_are_kept_in_the_bases_dtype"),
        absent="a bf16 adapter: small updates are lost in it, so there is no option",
    ),
    "E18": case(
        "a sample without visible words gives numbers; step 05 asks each device for the CPU's answer",
        at(
            "families/test_qwen_image_edit",
            "a_sample_whose_words_are_all_masked_is_finite_and_disturbs_no_other",
        ),
        at("adaptation/test_kernels", "the_cpu_passes", "masked_attention_that_is_wrong"),
        at(ENCODERS, "padding_stands_behind_whatever_the_folder_says"),
    ),
    "F1": case(
        "a resumed run goes on at the very step, in the middle of an epoch or at its end",
        at("training/test_resume", "resume_is_exact", "a_chain_of_resumes"),
    ),
    "F3": case(
        "an interruption between saves leaves that step; a resume takes the newest whole state",
        at(
            "training/test_loop", "an_exception_between_boundaries_leaves_a_resumable_checkpoint_of_that_step"
        ),
        at(
            "training/test_resume",
            "two_lasts_left_by_a_kill_are_reduced",
            "killed_at_step_7_of_20_and_resumed",
        ),
    ),
    "F5": case(
        "`latest` finds a state or is an error, and a broken one is passed over or named",
        at(
            "training/test_resume",
            "what_can_not_be_resumed",
            "latest_passes_over_a_broken_state",
            "a_damaged_state_is_named",
        ),
    ),
    "F7": case(
        "a state is of the same step as its weights",
        at("training/test_resume", "resume_is_exact"),
        at(
            "training/test_loop",
            "an_exception_between_boundaries_leaves_a_resumable_checkpoint_of_that_step",
            "a_failure_within_the_update_saves_nothing_half_done",
        ),
    ),
    "F9": case(
        "names in files are the same with and without torch.compile",
        at("training/test_adapter_file", "names_of_a_compiled_block_are_clean"),
    ),
    "F11": case(
        "a resume with accumulation counts updates, not micro-batches",
        at("training/test_resume", "resume_is_exact"),
        at("training/test_batches", "windows_are_the_micro_batches_in_order_from_any_step_on"),
    ),
    "G1": case(
        "the marker of 2511 is no weight; it sets the variant, and a base of another is refused",
        at("families/test_weights", "the_marker_of_2511_is_no_weight_and_sets_the_variant"),
    ),
    "G3": case(
        "a denoiser in the text encoder's place gets one line that says so",
        at("families/test_weights", "components_in_each_others_place_get_one_line", "kinds_by_name"),
    ),
    "G5": case(
        "one adapter in every naming is one delta, and it is written in those that tools read",
        at("training/test_adapter_file", "one_adapter_in_every_naming_is_one_delta"),
        at("commands/test_export", "each_form_loads_with_the_adapters_own_effect"),
    ),
    "G7": case(
        "an adapter of which nothing matches is an error",
        at("training/test_adapter_file", "refused"),
    ),
    "G9": case(
        "without alpha it is each module's own rank, whatever comes first in the file",
        at("training/test_adapter_file", "without_alpha_it_is_each_modules_own_rank_whatever_comes_first"),
    ),
    "G11": case(
        "an export has the names that its tool expects, every module, alpha beside",
        at("commands/test_export", "names", "each_form_loads_with_the_adapters_own_effect"),
        at("training/test_trainables", "saved_file_is_what_diffusers_and_peft_expect"),
    ),
    "G13": case(
        "fp8 weights are read in full and quantized from that; adapters are never merged, the base stays",
        at(
            "families/test_weights",
            "fp8_is_multiplied_by_its_scale",
            "fp8_is_quantized_from_its_values_in_full",
        ),
        at(
            PRECISION,
            "the_base_stays_as_it_was_while_every_lora_b_moves",
            "nothing_in_the_worker_merges_an_adapter_into_a_base",
        ),
        absent="merging an adapter into a base: there is none",
    ),
}


@lru_cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_row_is_in_the_table() -> None:
    assert tuple(CASES) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_the_named_tests_exist(row: str) -> None:
    case = CASES[row]
    assert case.right and case.tests and len(set(case.tests)) == len(case.tests)
    for node in case.tests:
        path, _, name = node.partition("::")
        assert name.startswith("test_") and name in functions(ROOT / path), node


def test_a_mix_is_named_after_each_row_that_it_holds() -> None:
    """One test holds many rows; its cases begin with theirs, by which a failure is found here."""
    tree = ast.parse((ROOT / MIXED[0].partition("::")[0]).read_text(encoding="utf-8"))
    (mixes,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["MIXES"]
    )
    assert isinstance(mixes, ast.Dict)
    named = {str(key.value).partition(":")[0] for key in mixes.keys if isinstance(key, ast.Constant)}
    assert named | {"A2"} == {row for row, case in CASES.items() if MIXED[0] in case.tests}
