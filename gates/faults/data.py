"""Datasets, caches and configs."""

from gates.faults.model import Fault

FAULTS = (
    Fault(
        id="dataset-without-split",
        title="load_dataset gave all splits at once, and one sample is asked of it",
        patterns=(
            r"KeyError: ['\"]?Invalid key: 0",
            r"please first select a split",
        ),
        cause="load_dataset(name) without split= returns a DatasetDict; an index or len() then fails.",
        mend=(
            "finetune dataset, which takes the split by itself",
            "in another trainer take dataset['train'], or the first split, where isinstance(dataset, DatasetDict)",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="prompt-embed-key",
        title="The keys that caption dropout reads lack an s",
        patterns=(r"KeyError: ['\"](empty_)?prompt_embed['\"]",),
        cause="qflux' default for prompt_empty_drop_keys names prompt_embed; the cache has prompt_embeds.",
        mend=(
            "set cache.prompt_empty_drop_keys: [empty_prompt_embeds, empty_prompt_embeds_mask]; the published "
            "prompt_embeds, prompt_embeds_mask raises nothing and drops nothing",
            "or set caption_dropout_rate: 0",
        ),
        sources=("training step, Troubleshooting", "qflux' cache guide"),
    ),
    Fault(
        id="cache-of-another-resolution",
        title="The cache was made at another resolution than the fit uses",
        patterns=(
            r"apply_rotary_emb_qwen",
            r"\bRoPE\b.*(mismatch|dimension)",
            r"size of tensor a \(\d+\) must match the size of tensor b \(\d+\).*rotary",
        ),
        cause="Lengths of the cached sequences don't match what the denoiser's RoPE is made for (2016 and 4608).",
        mend=(
            "finetune cache, which rebuilds what the config has changed (another trainer: delete the whole "
            "cache folder and build it anew)",
        ),
        sources=("training step, 7.1",),
    ),
    Fault(
        id="cache-torn",
        title="An interrupted cache phase left empty or half files",
        patterns=(r"json\.(decoder\.)?JSONDecodeError", r"(EOFError|PytorchStreamReader failed).*"),
        also=(r"cache",),
        cause="Files of the cache were being written when the process ended, and are read as if whole.",
        mend=("delete the whole cache folder", "finetune cache (another trainer: its cache phase)"),
        sources=("training step, 7.3",),
    ),
    Fault(
        id="cache-missing",
        title="The fit finds no cache",
        patterns=(
            r"cache (folder |directory |dir )?(\S+ )?(is )?(empty|missing|not found|does not exist)",
            r"no (such )?cach(e|ed) (was |were )?(found|\w+ found)",
            r"^error: no cache in ",
        ),
        unless=(r"building (it|the cache)",),
        cause="The cache phase was not run, or wrote elsewhere.",
        mend=(
            "finetune cache, then finetune fit",
            "never set cache.use_cache: false: it holds the text encoder beside the denoiser",
        ),
        sources=("training step, 7.1 and 7.3",),
    ),
    Fault(
        id="config-key-refused",
        title="The config has a key that the program does not know",
        patterns=(r"extra inputs are not permitted", r"\[type=extra_forbidden"),
        cause="The schema forbids what it does not know: lora.dtype and train.warmup_steps are often tried.",
        mend=(
            "remove the key; the warm-up is lr_scheduler.warmup_steps, and the adapter has no type to set",
            "finetune plan, then gate check 04",
        ),
        sources=("training step, Troubleshooting", "qflux' schema"),
    ),
)
