"""Qwen-Image-Edit-2509 and -2511: several controls, numbered in the prompt.

The text encoder sees each at 384 x 384 pixels' worth; 2511 also gives control tokens the
modulation of sigma 0, which its transformer's config (`zero_cond_t`) turns on by itself.
"""

from typing import Any, ClassVar

from diffusers import QwenImageEditPlusPipeline

from runtime.families.facts import QWEN_IMAGE_EDIT_PLUS
from runtime.families.qwen_image_edit import PICTURE, QwenImageEdit


class QwenImageEditPlus(QwenImageEdit):
    facts = QWEN_IMAGE_EDIT_PLUS
    pipeline_class: ClassVar[Any] = QwenImageEditPlusPipeline

    def _placeholders(self, images: int) -> str:
        return "".join(f"Picture {number + 1}: {PICTURE}" for number in range(images))
