"""Qwen-Image-Edit-2509 and -2511: several controls, numbered in the prompt.

The text encoder sees each at 384 x 384 pixels' worth; 2511 also gives control tokens the
modulation of sigma 0, which its transformer's config (`zero_cond_t`) turns on by itself.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from diffusers import QwenImageEditPlusPipeline
from PIL import Image

from runtime.families.qwen_image_edit import QwenImageEdit


class QwenImageEditPlus(QwenImageEdit):
    name = "qwen-image-edit-plus"
    template_version = "edit-plus-1"
    vl_pixels = 384 * 384
    max_controls = 8
    pipeline_class: ClassVar[Any] = QwenImageEditPlusPipeline

    def _prompt_images(self, controls: Sequence[Image.Image]) -> Any:
        return list(controls)
