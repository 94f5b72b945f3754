"""Image processors of vision-language models: the tokens that stand for an image, and the tensors that the model reads.

An image is processed alone, once, and by its digest: the ids of a conversation are the template's ids with each placeholder
replaced by the ids of its image. That this equals the processor's own output for a whole conversation is checked when the
processor is loaded.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.core.errors import ConversationError, ModelError
from agentrl.core.extras import install_command, require
from agentrl.core.images import Image, load_image
from agentrl.models.load import load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Features = dict[str, "torch.Tensor"]
"""Inputs of the vision tower by the names of ``forward``, such as ``pixel_values`` and ``image_grid_thw``, on the CPU."""

_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of a model folder that describe an image processor."""
_PLACEHOLDERS = ("image_token", "boi_token", "start_image_token", "image_start_token")
"""Attributes of processors with the token that a chat template writes for an image."""
_TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_CACHED_IDS = 512
"""Images whose ids are cached."""
_CHECK_SIZES = ((64, 40), (40, 90), (150, 31), (96, 96), (57, 133))
"""Widths and heights of the images of the check at load."""


class ImageProcessor:
    """The image part of a Hugging Face processor. Thread-safe.

    Args:
        processor: a processor of transformers with ``image_processor`` and ``tokenizer``.
        where: the folder with its key, for messages.
        cache_bytes: size of the cache of features; the least recently used are dropped, and the newest stay. By default only
            the last image has some: a renderer needs the ids alone.

    Raises:
        ModelError: the processor does not expand images one by one as it expands a whole conversation.
    """

    def __init__(self, processor: ProcessorMixin, where: str, *, cache_bytes: int = 0) -> None:
        self.where = where
        self.chat_template: str | None = _chat_template(processor)
        """The chat template of the processor, which may differ from the tokenizer's; None if it has none."""
        self._processor = processor
        self._lock = Lock()
        self._ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._features: OrderedDict[str, Features] = OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._joined_dims: dict[str, int] = {}
        self.placeholder, self.placeholder_id = self._find_placeholder()
        """The special token that a chat template writes for an image, and its id."""
        self.pad_ids: frozenset[int] = self._find_pads()
        """Ids of the tokens that the model replaces with features, such as ``<|image_pad|>``: one token for each feature."""
        self._check()

    def expand(self, image: Image) -> tuple[int, ...]:
        """Return the ids that replace the placeholder of an image in the ids of a rendered template.

        Raises:
            ConversationError: the image cannot be decoded, or the processor refuses it, such as for its aspect ratio.
        """
        with self._lock:
            if image.digest not in self._ids:
                self._process(image)
            self._ids.move_to_end(image.digest)
            return self._ids[image.digest]

    def features(self, image: Image) -> Features:
        """Return the features of one image, as the processor returns them for it alone. They must not be changed.

        Raises:
            ConversationError: see `expand`.
        """
        with self._lock:
            features = self._features.get(image.digest)
            if features is None:
                features = self._process(image)
            else:
                self._features.move_to_end(image.digest)
            return features

    def clear(self) -> None:
        """Drop the cached features."""
        with self._lock:
            self._features.clear()
            self._cached_bytes = 0

    def join(self, features: Sequence[Features]) -> Features:
        """Return the features of several images in the order of their tokens, as the model reads them; empty of none."""
        import torch

        if not features:
            return {}
        return {
            name: torch.cat([image[name] for image in features], dim) if len(features) > 1 else features[0][name]
            for name, dim in self._joined_dims.items()
        }

    def _process(self, image: Image) -> Features:
        """Compute ids and features of an image, and cache both."""
        try:
            ids, features = self._call(self.placeholder, [image])
        except Exception as error:  # processors raise errors of many kinds
            raise ConversationError(
                f"the image {image.digest[:12]} ({image.media_type}) cannot be processed by {self.where}: {error}"
            ) from error
        self._ids[image.digest] = ids
        if len(self._ids) > _CACHED_IDS:
            self._ids.popitem(last=False)
        self._features[image.digest] = features
        self._cached_bytes += _size(features)
        while self._cached_bytes > self._cache_bytes and len(self._features) > 1:
            self._cached_bytes -= _size(self._features.popitem(last=False)[1])
        return features

    def _call(self, text: str, images: Sequence[Image]) -> tuple[tuple[int, ...], Features]:
        """Return the ids of a text with placeholders, and the features of its images, of one call of the processor."""
        pictures = [image.to_pil() for image in images]
        output = self._processor(text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt")
        features = {str(name): data for name, data in output.items() if name not in _TEXT_INPUTS}
        return tuple(output["input_ids"][0].tolist()), features

    def _find_placeholder(self) -> tuple[str, int]:
        text = self._template_text([["probe", None]])
        tokens = [str(token) for name in _PLACEHOLDERS if (token := getattr(self._processor, name, None))]
        placeholder = next((token for token in tokens if text is None or text.count(token) == 1), None)
        if placeholder is None:
            raise self._error(f"the chat template writes none of {tokens} for an image")
        ids = self._processor.tokenizer.encode(placeholder, add_special_tokens=False)
        if len(ids) != 1:
            raise self._error(f"the placeholder {placeholder!r} of an image is not one token")
        return placeholder, int(ids[0])

    def _find_pads(self) -> frozenset[int]:
        ids = getattr(self._processor, "image_token_ids", None) or [getattr(self._processor, "image_token_id", None)]
        if not any(isinstance(index, int) for index in ids) and (
            token := getattr(self._processor, "image_token", None)
        ):
            ids = [self._processor.tokenizer.convert_tokens_to_ids(str(token))]
        pads = frozenset(index for index in ids if isinstance(index, int))
        if not pads:
            raise self._error("it does not name the token of an image's features (image_token_id)")
        return pads

    def _template_text(self, messages: Sequence[Sequence[str | None]]) -> str | None:
        """Return a conversation of users and assistants in turn, with None for images; None if there is no template for it."""
        roles = ("user", "assistant")
        conversation: Any = [
            {
                "role": roles[number % 2],
                "content": [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts],
            }
            for number, texts in enumerate(messages)
        ]
        if self.chat_template is None:
            return None
        try:
            return str(self._processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except Exception:  # a template may refuse such messages; then the renderer says so
            return None

    def _check(self) -> None:
        """Compare images one by one with the processor's own output for a whole conversation.

        Raises:
            ModelError: they differ.
        """
        images = [probe_image(width, height) for width, height in _CHECK_SIZES]
        turns: list[list[str | None]] = [
            ["first", None],
            ["seen"],
            [None, None, "then"],
            ["yes"],
            [None, "\n", None, "end"],
        ]
        text = self._template_text(turns)
        if text is None or text.count(self.placeholder) != len(images):
            text = "\n".join("".join(self.placeholder if piece is None else piece for piece in turn) for turn in turns)
        try:
            ids, features = self._call(text, images)
            singles = [self._call(self.placeholder, [image]) for image in images]
        except Exception as error:  # processors raise errors of many kinds
            raise self._error(f"it fails on a conversation of {len(images)} images: {error}") from error
        pieces = iter(single_ids for single_ids, _ in singles)
        encoded = self._processor.tokenizer.encode(text, add_special_tokens=False)
        expanded = tuple(
            index for token in encoded for index in (next(pieces) if token == self.placeholder_id else (token,))
        )
        if expanded != ids:
            at = next((at for at, (ours, its) in enumerate(zip(expanded, ids, strict=False)) if ours != its), len(ids))
            raise self._error(
                f"it expands a conversation of {len(images)} images to {len(ids)} tokens, and its images one by one to "
                f"{len(expanded)}; they differ from token {at} on"
            )
        if not all(self.pad_ids.intersection(single_ids) for single_ids, _ in singles):
            raise self._error(f"it writes no token of {sorted(self.pad_ids)} for an image")
        self._joined_dims = self._find_dims(features, [single for _, single in singles])

    def _find_dims(self, conversation: Features, singles: Sequence[Features]) -> dict[str, int]:
        """Return the dimension along which features of single images are concatenated to those of a conversation, by name."""
        import torch

        dims = {}
        for name, data in conversation.items():
            for dim in range(min(2, data.dim())):
                try:
                    joined = torch.cat([single[name] for single in singles], dim)
                except (RuntimeError, KeyError):
                    continue
                if joined.shape == data.shape and torch.equal(joined, data):
                    dims[name] = dim
                    break
            else:
                raise self._error(f"its {name} of {len(singles)} images are not those of the images one by one")
        return dims

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: its {type(self._processor).__name__} cannot be used for images: {reason}")


def has_image_processor(folder: Path) -> bool:
    """Return whether a model folder describes an image processor."""
    return any("image_processor_type" in settings or "image_processor" in settings for settings in _settings(folder))


def image_processor_loader(folder: Path, *, trust_remote_code: bool = False) -> Callable[[], ImageProcessor] | None:
    """Return a function that loads a model's image processor; None if the model reads text only."""
    if not has_image_processor(folder):
        return None
    return partial(load_image_processor, folder, trust_remote_code=trust_remote_code)


def load_image_processor(
    folder: Path, key: str = "model.path", *, trust_remote_code: bool = False, cache_bytes: int = 0
) -> ImageProcessor:
    """Return the image processor of a model folder. Images are resized with Pillow, not with torchvision.

    Args:
        folder: with ``preprocessor_config.json`` or ``processor_config.json``, and a tokenizer.
        key: configuration key of the folder, for messages.
        trust_remote_code: run Python code of the folder if the processor needs it (``model.trust_remote_code``).
        cache_bytes: see `ImageProcessor`.

    Raises:
        ModelError: the folder has no image processor, it cannot be loaded, or see `ImageProcessor`.
        MissingError: Pillow is not installed.
    """
    where = f"{key}={folder}"
    if not has_image_processor(folder):
        raise ModelError(f"{where} has no image processor ({' or '.join(_FILES)}): its model reads text only")
    require("PIL", f"images of {where}")
    tokenizer = load_tokenizer(folder, key, trust_remote_code=trust_remote_code)
    try:
        processor = _load_processor(folder, tokenizer, trust_remote_code)
    except ImportError as error:
        raise ModelError(
            f"{where}: its image processor cannot be loaded: {error}; {install_command('PIL')} "
            "installs what known processors need"
        ) from error
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"{where}: its image processor cannot be loaded: {type(error).__name__}: {error}") from error
    return ImageProcessor(processor, where, cache_bytes=cache_bytes)


def _load_processor(folder: Path, tokenizer: PreTrainedTokenizerBase, trusted: bool) -> ProcessorMixin:
    """Return the processor without what it needs for video and audio, which would need torchvision and more."""
    import transformers
    from transformers import AutoImageProcessor, AutoProcessor

    kind: Any = getattr(transformers, _processor_class(folder), None)
    if kind is None:
        auto: Any = AutoProcessor
        remote: ProcessorMixin = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trusted)
        return remote

    class ImagesOnly(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> object:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    ImagesOnly.__name__ = kind.__name__
    auto_images: Any = AutoImageProcessor
    parts = {
        "tokenizer": tokenizer,
        "image_processor": auto_images.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trusted, backend="pil"
        ),
    }
    settings, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    processor: Any = ImagesOnly.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], settings)
    loaded: ProcessorMixin = processor[0] if isinstance(processor, tuple) else processor
    return loaded


def _processor_class(folder: Path) -> str:
    """Return the name of the processor's class in transformers; empty if none is known."""
    from transformers.models.auto import processing_auto

    mapping: Mapping[str, str] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    names = [str(settings["processor_class"]) for settings in _settings(folder) if settings.get("processor_class")]
    model_type = str(_read(folder / "config.json").get("model_type"))
    names += [str(mapping[model_type])] if model_type in mapping else []
    return names[0] if names else ""


def _settings(folder: Path) -> Iterable[Mapping[str, object]]:
    return [_read(folder / name) for name in (*_FILES, "tokenizer_config.json")]


def _read(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error


def _chat_template(processor: ProcessorMixin) -> str | None:
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    return template if isinstance(template, str) else None


def _size(features: Features) -> int:
    return sum(data.numel() * data.element_size() for data in features.values())


def probe_image(width: int, height: int) -> Image:
    """Return an image for checks, in which no two pixels near each other are equal."""
    from PIL import Image as pil

    rows, columns, channels = np.indices((height, width, 3), dtype=np.uint8)
    return load_image(pil.fromarray(rows * 13 + columns * 7 + channels * 89))
