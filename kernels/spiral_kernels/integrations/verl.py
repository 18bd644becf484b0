"""verl's fused log-probs from linear_logprob.

    # my_head.py, on the workers' path; actor_rollout_ref.model.external_lib=my_head
    from spiral_kernels.integrations.verl import use_linear_logprob
    use_linear_logprob()

and actor_rollout_ref.model.use_fused_kernels=True with fused_kernel_options.impl_backend=torch. verl then asks
FusedLinearForPPO for log-probs and entropies of each micro-batch; `linear_for_ppo` answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiral_kernels.integrations.head import head_dtype, logprob_and_entropy


def linear_for_ppo(
    hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs of `input_ids` under the head and its entropies, with verl's arguments and meaning.

    hidden_states (..., H) and vocab_weights (V, H), computed in the dtype of autocast or else of hidden_states;
    input_ids (...) of any integer dtype, the token that each hidden state predicts (already rolled), in 0 .. V-1;
    temperature > 0: a number or of input_ids' shape.
    Returns log_probs and entropy (...), nats, float32 (verl's own entropy has the dtype of hidden_states), both with
    gradients by hidden_states and, if it requires one, vocab_weights. Errors as `linear_logprob`.
    """
    if input_ids.shape != hidden_states.shape[:-1]:
        shapes = f"{tuple(input_ids.shape)}, hidden_states {tuple(hidden_states.shape)}"
        raise ValueError(f"linear_for_ppo: input_ids must have one id per hidden state, got {shapes}")
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature.expand(input_ids.shape).flatten()
    dtype = head_dtype(hidden_states)
    log_probs, entropy = logprob_and_entropy(
        hidden_states.flatten(0, -2).to(dtype),
        vocab_weights.to(dtype),
        input_ids.flatten().to(torch.int64),
        temperature=temperature,
    )
    return log_probs.view(input_ids.shape), entropy.view(input_ids.shape)


def use_linear_logprob() -> None:
    """verl.utils.experimental.torch_functional.FusedLinearForPPO, in this process, answers by `linear_for_ppo`.

    Raises ImportError if verl is not installed.
    """
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        return linear_for_ppo(hidden_states, vocab_weights, input_ids, temperature)

    FusedLinearForPPO.forward = forward
