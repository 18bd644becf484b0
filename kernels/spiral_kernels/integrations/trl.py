"""TRL's GRPOTrainer with log-probs and entropies from linear_logprob.

    from spiral_kernels.integrations.trl import use_linear_logprob

    trainer = GRPOTrainer(model, reward_funcs, args=args, train_dataset=dataset)
    use_linear_logprob(trainer)
    trainer.train()

TRL (1.15 on) asks its model for log-probs instead of logits: `model(..., labels=labels, fused_lm_head=True)`. That call
is answered here; generation, rewards, credits, the loss and what is logged stay TRL's own, so every loss_type,
importance_sampling_level, beta, entropy bonus and mask works as before.
"""

from __future__ import annotations

import functools
import types

import torch
from torch import Tensor, nn

from spiral_kernels.integrations.head import head_dtype, logprob_and_entropy
from spiral_kernels.linear_logprob import linear_logprob

# What a model may do to its logits beside the soft-cap, by the name of the config's field.
LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def use_linear_logprob(trainer) -> None:
    """Policy and reference model of `trainer`, a trl.GRPOTrainer, from now on take their log-probs here.

    Call it after the trainer is made and before train(). With LoRA, full fine-tuning, soft-capped logits, a frozen head
    bias, autocast to bfloat16 and cast_lm_head_to_fp32; on one device or with DistributedDataParallel. Precision is
    that of the dtype TRL would use for the head; sums and the softmax are float32.

    Raises ImportError for a TRL without fused heads, TypeError for another trainer, ValueError with one line that
    names what is not served: fp16 without cast_lm_head_to_fp32, FSDP and DeepSpeed, vision-language models, the router
    loss of mixtures of experts, scaled logits, a head that is no plain linear layer (an adapter on it).
    """
    import trl

    try:
        from trl.trainer.utils import add_fused_lm_head  # noqa: F401  its call is what we answer
    except ImportError:
        raise ImportError(f"use_linear_logprob: needs trl >= 1.15, found {trl.__version__}") from None
    if not isinstance(trainer, trl.GRPOTrainer):
        raise TypeError(f"use_linear_logprob: needs a trl.GRPOTrainer, got {type(trainer).__name__}")
    in_float32 = trainer.args.cast_lm_head_to_fp32
    _refuse(trainer, trainer.args.fp16 and not in_float32, "fp16=True", "set bf16=True or cast_lm_head_to_fp32=True")
    _refuse(trainer, trainer.is_fsdp_enabled, "FSDP", "train with DistributedDataParallel")
    _refuse(trainer, trainer.is_deepspeed_enabled, "DeepSpeed", "train with DistributedDataParallel")
    for model, with_entropy in ((trainer.model, True), (trainer.ref_model, False)):
        if model is not None:
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            _refuse_model(trainer, base)
            answer_here(base, trainer.temperature, in_float32, with_entropy)


def _refuse(trainer, unserved: bool, what: str, instead: str) -> None:
    if unserved:
        raise ValueError(
            f"use_linear_logprob: {what} is not served; {instead}, or leave {type(trainer).__name__} as it is"
        )


def _refuse_model(trainer, model: nn.Module) -> None:
    config, head = model.config, model.get_output_embeddings()
    refuse = functools.partial(_refuse, trainer, instead="choose another model")
    refuse(config.get_text_config() is not config, what="a vision-language model")
    refuse(getattr(trainer, "aux_loss_enabled", False), what="the router loss of a mixture of experts")
    for name in LOGIT_SCALES:
        refuse(
            getattr(config, name, None) not in (None, 1.0), what=f"{name} = {getattr(config, name, None)} in the config"
        )
    refuse(type(head) is not nn.Linear, what=f"a head that is {type(head).__name__}, not nn.Linear,")
    refuse(head.bias is not None and head.bias.requires_grad, what="a trained bias of the head")


def answer_here(model: nn.Module, temperature: float, in_float32: bool, with_entropy: bool) -> None:
    """Calls of `model`, on which TRL has put its fused head, with fused_lm_head=True are answered by linear_logprob."""
    from trl.trainer.utils import FusedCausalLMOutput

    before = model.forward
    soft_cap = getattr(model.config, "final_logit_softcapping", None)

    # `generate` and the trainer look at the signature of the model's own forward
    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs):
        if not fused_lm_head:
            return before(*args, **kwargs) if labels is None else before(*args, labels=labels, **kwargs)
        hidden = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state  # (B, L, H)
        head = self.get_output_embeddings()
        labels = labels[:, 1:]  # position t predicts token t + 1
        scored = labels != -100  # (B, L - 1)
        sequence, position = scored.nonzero(as_tuple=True)
        dtype = torch.float32 if in_float32 else head_dtype(hidden)
        options = {"row_index": sequence * hidden.shape[1] + position, "temperature": temperature}
        if head.bias is not None:
            options["bias"] = head.bias
        if soft_cap is not None:
            options["soft_cap"] = soft_cap
        arguments = hidden.flatten(0, 1).to(dtype), head.weight.to(dtype), labels[scored]
        if with_entropy:
            logp, entropy = logprob_and_entropy(*arguments, **options)
        else:
            logp, entropy = linear_logprob(*arguments, **options).logp, None

        def spread(rows: Tensor) -> Tensor:
            return rows.new_zeros(scored.shape).masked_scatter(scored, rows)

        entropy = None if entropy is None else spread(entropy)
        return FusedCausalLMOutput(log_probs=spread(logp), entropy=entropy, label_mask=scored)

    model.forward = types.MethodType(forward, model)
