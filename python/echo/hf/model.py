"""A Hugging Face DSA model as a forward for `echo.Runtime`.

Everything but attention is done by transformers' own modules (embedding, norms, rotary embedding, MLPs,
head), so a checkpoint that transformers loads runs here with the same weights and the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from echo import ForwardPass, InvalidArgument, ModelShape, NotSupported
from echo.decoding import runtime_device
from echo.hf.attention import LayerTensors, SparseAttention
from echo.hf.shape import INTERLEAVED_INDEX, require_dsa, shape_of

Observer = Callable[[ForwardPass, LayerTensors], None]
"""Called after the attention of each layer; `p.selection` is then the selection the layer attended to."""


class DsaModel:
    """Runs `DeepseekV32ForCausalLM` or `GlmMoeDsaForCausalLM` with its KV in a Runtime.

    Args:
        model: the loaded model, on one device, in float32 or bfloat16 (apart from quantised weights). It is
            used, not copied: move it before, and keep it where it is.
        observer: sees what each layer exchanges with the runtime; of captured steps, only the capture.

    Raises:
        NotSupported: another kind of model; rotary embeddings that change with the length; several devices.
        InvalidArgument: naming `model`, if it is none or has another type of numbers.
    """

    def __init__(self, model: Any, observer: Observer | None = None) -> None:
        """See the class."""
        if not hasattr(model, "config"):
            raise InvalidArgument(
                f"model: {model!r} given, expected a model of transformers; DsaModel.from_pretrained loads a folder"
            )
        require_dsa(model.config)
        _require_fixed_rotary(model.config)
        self.model = model
        self.observer = observer
        self.device = _device_of(model)
        self.dtype: torch.dtype = model.model.norm.weight.dtype
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise InvalidArgument(f"model: weights are {self.dtype}, expected float32 or bfloat16")
        self._layers = model.model.layers[: model.config.num_hidden_layers]
        interleaved = INTERLEAVED_INDEX[model.config.model_type]
        self._attentions = [
            SparseAttention(layer.self_attn, number, interleaved) for number, layer in enumerate(self._layers)
        ]

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | str = "auto",
        device: str | torch.device = "auto",
        observer: Observer | None = None,
        **options: Any,
    ) -> DsaModel:
        """Loads a checkpoint from a local folder; never from the network.

        Args:
            folder: `config.json` and safetensors, as `save_pretrained` writes them.
            dtype: float32, bfloat16, or "auto" for what the checkpoint has.
            device: where the model runs; "auto": where a runtime does that is told no other device.
            observer: see the class.
            **options: passed on to transformers, for example `experts_implementation="batched_mm"`.

        Raises:
            InvalidArgument: naming `folder`, if it is none or holds no configuration.
            NotSupported: see the class.
        """
        if not (Path(folder) / "config.json").is_file():
            raise InvalidArgument(f"folder: {str(folder)!r} given, expected a folder with a config.json")
        require_dsa(AutoConfig.from_pretrained(folder, local_files_only=True))
        if device == "auto":
            device = runtime_device()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
        return cls(model.to(device).eval(), observer)

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, as the checkpoint says."""
        settings = getattr(self.model, "generation_config", None) or self.config
        ends = settings.eos_token_id
        return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step.

        Not with mixtures of experts in transformers' "eager" implementation, which synchronises to see which
        experts are used: load with `experts_implementation="batched_mm"` ("grouped_mm" in bfloat16), or step
        without capture.
        """
        mixed = any(hasattr(layer.mlp, "experts") for layer in self._layers)
        way = getattr(self.config, "_experts_implementation", None)
        return not mixed or way == "batched_mm" or (way == "grouped_mm" and self.dtype == torch.bfloat16)

    def shape(self, row_format: str = "fp8_656", index_key_format: str = "fp8") -> ModelShape:
        """Sizes for `echo.Runtime`; see `shape_of`."""
        return shape_of(self.config, row_format, index_key_format)

    @torch.no_grad()
    def forward(self, p: ForwardPass, all_rows: bool = False) -> Tensor:
        """The forward to give to `Runtime.prefill`, `step` or `capture`. Never waits for the device.

        Args:
            p: the pass; its runtime is on the model's device.
            all_rows: compute logits of all rows of a prefill, not only its last; set by `functools.partial`.

        Returns:
            Logits in the model's type, [rows, vocab]; of a prefill [1, vocab] unless `all_rows`.

        Raises:
            InvalidArgument: naming `device`, if the pass is on another one than the model.
        """
        if p.device != str(self.device):
            raise InvalidArgument(
                f"device: the model is on {self.device}, the runtime on {p.device}; give both the same device"
            )
        tokens = torch.from_dlpack(p.tokens)
        positions = torch.from_dlpack(p.positions).clamp(min=0)  # padding rows have -1
        body = self.model.model
        hidden: Tensor = body.embed_tokens(tokens)
        cos, sin = body.rotary_emb(hidden, position_ids=positions[None])
        rotary = (cos[0], sin[0])
        for layer, attention in zip(self._layers, self._attentions, strict=True):
            attended, tensors = attention(p, layer.input_layernorm(hidden), rotary)
            if self.observer is not None:
                self.observer(p, tensors)
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        if p.is_prefill and not all_rows:
            hidden = hidden[-1:]
        logits: Tensor = self.model.lm_head(body.norm(hidden))
        return logits

    __call__ = forward


def _device_of(model: Any) -> torch.device:
    devices: set[torch.device] = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise NotSupported(f"model: spread over {', '.join(sorted(map(str, devices)))}, expected one device")
    return devices.pop()


def _require_fixed_rotary(config: Any) -> None:
    kind = config.rope_parameters.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):  # they rescale as the text grows, which cached keys cannot follow
        raise NotSupported(f"model: rotary embedding {kind!r} given, expected one that is the same at any length")
