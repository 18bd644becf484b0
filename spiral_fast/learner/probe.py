"""A few tokens through a loaded model: whatever its architecture does that the packed path does not know shows here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError
from spiral_fast.learner.packed import DocumentAttention, Packed, pack
from spiral_fast.learner.policy import Policy
from spiral_fast.supported import UnsupportedModel, key_value_shape, windows

# Nats a token, mean. In bf16 two right computations of SmolLM2-135M differ by 0.06, of builtin:parts by 0.04; larger
# models have larger logits and so a little more. In float32 both differ by 6e-6.
LARGEST_GAP = {torch.float32: 1e-3, torch.float64: 1e-3}
LARGEST_GAP_16_BIT = 0.2


@torch.no_grad()
def check_packed(model: PeftModel, replace: Callable[[], object] = lambda: None) -> None:
    """Leave the model on ATTENTION, having compared its own forward with head and packed log-probs. `replace` is called
    in between: what it puts in place of transformers' modules is compared with these. Raises UnsupportedModel."""
    causal_lm = model.get_base_model()
    head = causal_lm.get_output_embeddings()
    n_vocabulary = head.weight.shape[0]
    ids = torch.linspace(n_vocabulary // 4, n_vocabulary - n_vocabulary // 4, 16).long().tolist()
    packed = pack([(ids[:7], ids[7:]), (ids[3:4], ids[:3])], head.weight.device)
    packed.attend = seen = _Seen(packed.attend)
    name = type(causal_lm).__name__
    try:
        logits, of_head = _own_logits(causal_lm, packed)
        replace()
        causal_lm.set_attn_implementation(ATTENTION)
        logp = Policy(model)(packed, 1.0).logp.float()
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModel(f"is a {name}, whose forward does not run on packed tokens ({reason})") from error
    if not logits.isfinite().all():
        raise UnsupportedModel("gives log-probs that are not finite: some of its weights are broken")
    if not torch.allclose(logits, of_head, rtol=0, atol=1e-2 * of_head.abs().max().item()):
        raise UnsupportedModel(f"is a {name}, whose logits are not the output of its head alone")
    expected = logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
    gap = (logp - expected).abs().mean().item()
    if not gap < LARGEST_GAP.get(head.weight.dtype, LARGEST_GAP_16_BIT):
        raise UnsupportedModel(f"is a {name}: its packed forward is off by {gap:.2g} nats a token")
    n_layers = len(causal_lm.get_decoder().layers)
    if [layer for layer, *_ in seen.calls] != list(range(n_layers)):
        raise UnsupportedModel(f"is a {name}, not each of whose {n_layers} layers attends once")
    heads, size = key_value_shape(causal_lm.config)
    for (layer, shape, window), expected in zip(seen.calls, windows(causal_lm.config), strict=True):
        if window != expected:
            raise UnsupportedModel(
                f"is a {name}, whose layer {layer} has a sliding window of {window}; by its config it is {expected}"
            )
        if shape != (heads, size, size):
            raise UnsupportedModel(
                f"is a {name}, whose layer {layer} has {shape[0]} key/value heads of {shape[1]} and {shape[2]} "
                f"numbers; by its config each layer has {heads} of {size}"
            )


def _own_logits(causal_lm: PreTrainedModel, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, V) float32 logits that predict packed.targets by transformers' eager forward of each document alone; the same
    computed by the head from the decoder's hidden states."""
    causal_lm.set_attn_implementation("eager")
    decoder, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
    own, of_head = [], []
    for ids in packed.tokens[0].split(packed.attend.lengths):
        own.append(causal_lm(input_ids=ids[None], use_cache=False).logits[0])
        of_head.append(head(decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]))
    return tuple(torch.cat(parts)[packed.row_index].float() for parts in (own, of_head))


class _Seen:
    """Passes attention on and notes of each call the layer, the shape of its keys and values, its window."""

    def __init__(self, attention: DocumentAttention):
        self.attention = attention
        self.lengths = [length for length, count in attention.runs for _ in range(count)]
        self.calls: list[tuple[int, tuple[int, int, int], int | None]] = []  # layer, (Hkv, D of key, of value), window

    def attend(self, layer, query, key, value, scale, window=None) -> torch.Tensor:
        self.calls.append((layer, (key.shape[1], key.shape[3], value.shape[3]), window))
        return self.attention.attend(layer, query, key, value, scale, window)
