"""Shape of a SmolVLA policy, read from a checkpoint's `config.json` and its vision-language model's.

lerobot stores the policy's own numbers in the checkpoint and only the *name* of the vision-language model
(VLM); that model's `config.json` holds the sizes of the vision tower and of the text layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from dayshift.types import DayshiftError

IMAGE_PREFIX = "observation.images."
STATE = "observation.state"
ACTION = "action"

_FFN_MULTIPLE = 256  # lerobot rounds the expert's feed-forward width up to this


class Feature(msgspec.Struct, frozen=True):
    """One input or output of the policy, as lerobot declares it."""

    type: str  # VISUAL, STATE, ACTION …
    shape: tuple[int, ...]


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What inference needs of lerobot's `SmolVLAConfig`; same names, same defaults.

    `prefix_length` and `pad_language_to` are not read: padding is masked and changes no result.
    """

    type: str
    input_features: dict[str, Feature]
    output_features: dict[str, Feature]
    vlm_model_name: str
    chunk_size: int = 50
    n_action_steps: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    resize_imgs_with_padding: tuple[int, int] = (512, 512)  # width, height
    empty_cameras: int = 0
    adapt_to_pi_aloha: bool = False
    use_peft: bool = False
    num_steps: int = 10
    add_image_special_tokens: bool = False
    attention_mode: str = "cross_attn"
    num_expert_layers: int = -1
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    min_period: float = 4e-3
    max_period: float = 4.0


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The SigLIP tower. Published files leave out what equals transformers' defaults, repeated here."""

    hidden_size: int = 1152
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The Llama layers of the VLM. Its rope_theta is not read: lerobot rotates with 10,000 always."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    model_type: str = "llama"
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False


class VlmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The VLM's `config.json`."""

    text_config: TextConfig
    vision_config: VisionConfig
    scale_factor: int = 2  # pixel shuffle: scale_factor² patches become one token


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of one transformer layer. Text layers and expert layers share the attention's sizes."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool

    @property
    def q_size(self) -> int:
        """Width of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys (or values) of a token."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchShape:
    """Square images of `side` pixels, cut into square patches. What is left over at the right and below
    belongs to none."""

    side: int
    patch: int

    @property
    def grid(self) -> int:
        """Patches in a row, and rows."""
        return self.side // self.patch

    @property
    def of_image(self) -> tuple[int, int]:
        """(num_patches, values of a patch: channel by channel, row by row)."""
        return self.grid**2, 3 * self.patch**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayerPlan:
    """Which text layer's keys and values an expert layer reads, and whether it also reads its own."""

    text_layer: int
    is_self_attention: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVLAConfig:
    """A whole policy. Make it with `load_config`, which checks it."""

    policy: PolicyConfig
    vlm: VlmConfig

    @property
    def text_shape(self) -> LayerShape:
        """Sizes of the VLM's text layers."""
        text = self.vlm.text_config
        return LayerShape(
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_heads=text.num_attention_heads,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim or text.hidden_size // text.num_attention_heads,
            rms_norm_eps=text.rms_norm_eps,
            attention_bias=text.attention_bias,
            mlp_bias=text.mlp_bias,
        )

    @property
    def expert_shape(self) -> LayerShape:
        """Sizes of the action expert's layers: the text layers' attention at a smaller hidden size."""
        text = self.text_shape
        hidden_size = int(text.hidden_size * self.policy.expert_width_multiplier)
        ffn = 4 * int(2 * hidden_size / 3)
        return LayerShape(
            hidden_size=hidden_size,
            intermediate_size=-(-ffn // _FFN_MULTIPLE) * _FFN_MULTIPLE,
            num_heads=text.num_heads,
            num_kv_heads=text.num_kv_heads,
            head_dim=text.head_dim,
            rms_norm_eps=text.rms_norm_eps,
            attention_bias=text.attention_bias,
            mlp_bias=text.mlp_bias,
        )

    @property
    def num_text_layers(self) -> int:
        """Text layers in use: the first `num_vlm_layers`, or all."""
        available = self.vlm.text_config.num_hidden_layers
        wanted = self.policy.num_vlm_layers
        return min(wanted, available) if wanted > 0 else available

    @property
    def expert_plan(self) -> tuple[ExpertLayerPlan, ...]:
        """The expert's layers, in order."""
        num_expert = self.policy.num_expert_layers
        stride = self.num_text_layers // num_expert if num_expert > 0 else 1
        return tuple(
            ExpertLayerPlan(text_layer=layer, is_self_attention=self.is_self_attention(layer))
            for layer in range(0, self.num_text_layers, stride)
        )

    def is_self_attention(self, text_layer: int) -> bool:
        """Whether the expert attends to its own tokens too, beside this text layer's."""
        every = self.policy.self_attn_every_n_layers
        return "cross" not in self.policy.attention_mode or (every > 0 and text_layer % every == 0)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Full names of the cameras that a request may hold, in the order of the prefix."""
        empty = {f"{IMAGE_PREFIX}empty_camera_{i}" for i in range(self.policy.empty_cameras)}
        features = self.policy.input_features
        return tuple(n for n, feature in features.items() if feature.type == "VISUAL" and n not in empty)

    @property
    def image_side(self) -> int:
        """Height and width in pixels of the images that the vision tower sees."""
        return self.policy.resize_imgs_with_padding[0]

    @property
    def patch_grid(self) -> int:
        """Patches along one side of an image."""
        return self.patch_shape.grid

    @property
    def patch_shape(self) -> PatchShape:
        """How images are cut for the vision tower."""
        return PatchShape(side=self.image_side, patch=self.vlm.vision_config.patch_size)

    @property
    def tokens_per_image(self) -> int:
        """Prefix tokens of one image, special tokens not counted."""
        return (self.patch_grid // self.vlm.scale_factor) ** 2

    @property
    def state_dim(self) -> int:
        """Numbers in a robot state, before padding to `max_state_dim`."""
        return self.policy.input_features[STATE].shape[0]

    @property
    def action_dim(self) -> int:
        """Numbers in an action, before padding to `max_action_dim`."""
        return self.policy.output_features[ACTION].shape[0]


def read_struct[StructT: msgspec.Struct](path: Path, struct: type[StructT]) -> StructT:
    """Decode a JSON file. Raises DayshiftError with the path, the place in it and what is wanted there."""
    if not path.is_file():
        raise DayshiftError(f"{path.parent} has no {path.name}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=struct)
    except msgspec.MsgspecError as error:
        raise DayshiftError(f"{path}: {error}") from error


def load_policy_config(folder: Path) -> PolicyConfig:
    """Read a checkpoint's `config.json`. Raises DayshiftError when it is no SmolVLA that runs here."""
    path = folder / "config.json"
    config = read_struct(path, PolicyConfig)
    problem = _policy_problem(config)
    if problem:
        raise DayshiftError(f"{path}: {problem}")
    return config


def load_config(checkpoint: Path, policy: PolicyConfig, vlm: Path) -> SmolVLAConfig:
    """Join a checkpoint's configuration with its VLM's. Raises DayshiftError when they do not fit."""
    config = SmolVLAConfig(policy=policy, vlm=read_struct(vlm / "config.json", VlmConfig))
    problem = _vlm_problem(config.vlm)
    if problem:
        raise DayshiftError(f"{vlm / 'config.json'}: {problem}")
    problem = _layer_problem(config) or _input_problem(config)
    if problem:
        raise DayshiftError(f"{checkpoint / 'config.json'}: {problem}")
    return config


def _policy_problem(policy: PolicyConfig) -> str | None:
    if policy.type != "smolvla":
        return f"policy type {policy.type!r} is not supported; supported is 'smolvla'"
    if policy.adapt_to_pi_aloha:
        return "adapt_to_pi_aloha is not supported"
    if policy.use_peft:
        return "use_peft: adapters are not supported; merge them into the weights first"
    if policy.num_steps < 1 or policy.chunk_size < 1:
        return f"num_steps {policy.num_steps} and chunk_size {policy.chunk_size} must be at least 1"
    for name, features in ((STATE, policy.input_features), (ACTION, policy.output_features)):
        if name not in features or len(features[name].shape) != 1:
            return f"there is no feature {name} with one dimension"
    return None


def _vlm_problem(vlm: VlmConfig) -> str | None:
    text, vision = vlm.text_config, vlm.vision_config
    if text.model_type != "llama" or text.hidden_act != "silu":
        return f"text layers of type {text.model_type!r} with {text.hidden_act!r}; supported: llama with silu"
    if vision.hidden_act != "gelu_pytorch_tanh":
        return f"vision_config.hidden_act {vision.hidden_act!r}; supported: gelu_pytorch_tanh"
    if text.num_attention_heads % text.num_key_value_heads:
        return f"{text.num_attention_heads} heads do not share {text.num_key_value_heads} KV heads evenly"
    return None


def _layer_problem(config: SmolVLAConfig) -> str | None:
    num_text, num_expert = config.num_text_layers, config.policy.num_expert_layers
    if num_expert > 0 and num_text % num_expert:
        return f"{num_text} text layers are no multiple of num_expert_layers {num_expert}"
    size = config.expert_shape.hidden_size
    if size % 2 or size < 2:
        return f"expert_width_multiplier gives a hidden size of {size}; it must be even"
    served = {plan.text_layer for plan in config.expert_plan}
    lonely = [i for i in range(num_text) if config.is_self_attention(i) and i not in served]
    if lonely:  # lerobot fails on these as well, when it first runs
        return f"self-attention is due at text layer {lonely[0]}, where there is no expert layer"
    return None


def _input_problem(config: SmolVLAConfig) -> str | None:
    policy = config.policy
    if not config.cameras:
        return "input_features name no camera (type VISUAL)"
    if config.state_dim > policy.max_state_dim:
        return f"{STATE} has {config.state_dim} numbers, max_state_dim is {policy.max_state_dim}"
    if config.action_dim > policy.max_action_dim:
        return f"{ACTION} has {config.action_dim} numbers, max_action_dim is {policy.max_action_dim}"
    width, height = policy.resize_imgs_with_padding
    if width != height:
        return f"resize_imgs_with_padding is {width} x {height}; the vision tower takes square images"
    grid, scale = config.patch_grid, config.vlm.scale_factor
    if grid < scale or grid % scale:
        patches = f"images of {width} pixels give {grid} x {grid} patches"
        return f"{patches}; pixel shuffle needs a multiple of {scale}"
    return None
