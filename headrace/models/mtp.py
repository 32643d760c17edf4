"""Multi-token prediction (MTP): a decoder layer that drafts, of Qwen3.5, Qwen3-Next and Nemotron 3 Super.

    x_t = fc [norm_e(embed(token t)); norm_h(h_(t-1))]      h: the model's hidden vectors behind its final norm
    m_t = norm(layer(x_0 ... x_t))                          one attention layer and one feed-forward, causal
    logits of token t + 1 = head(m_t)                       the model's own embedding and head

The next draft repeats this with m_t in place of h_t, as often as there are drafts.

Sources   tensors, order of the two halves of `fc`, `norm`: vLLM, qwen3_5_mtp.py and nemotron_h_mtp.py in
          vllm/model_executor/models; SGLang, python/sglang/srt/models/qwen3_5_mtp.py. h is taken behind the final norm:
          LightLLM pull request 1402 (1.80 accepted tokens a step without it, 2.74 with it), llama.cpp 24025,
          Rapid-MLX 3371

Where entries lie. The entry of keys and values that h_(t-1) and token t make lies at position t, with the rotation of
position t. vLLM puts it at t - 1; rotary scores depend on differences of positions alone, so nothing else changes. At
position t it is a function of tokens 0..t, like all that a block holds: a published block serves every prompt that
begins with its tokens, and a chunk of a prompt needs no token of the next. Its price is that nothing belongs at
position 0, where no h came before: what lies there is never read (`Attention.skips_first`).

h of the newest token is part of the state, as a convolution's window is: the first entry of the next chunk needs it,
and the first draft. So it is in every checkpoint, and goes where states go; between written states it is in the ring.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from headrace.forward.forward_batch import ForwardBatch, LayerContext
from headrace.kernels.conv.prefill import causal_conv1d
from headrace.kernels.conv.tail_update import causal_conv1d_tail_update
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.rms_norm import rms_norm, rms_norm_rows
from headrace.models.branches import BranchChain, MixerBranch
from headrace.models.layers.attention import Attention


@dataclass(frozen=True)
class MtpLayer:
    """The layer and the projection in front of it. Embedding and head are the model's."""

    embedding_norm: Tensor  # float32
    hidden_norm: Tensor
    fc: LinearWeight  # [hidden, 2 * hidden]: columns of the embedding, then of the hidden vector
    chain: BranchChain

    def store(self, embedded: Tensor, hidden: Tensor, context: LayerContext) -> None:
        """Writes the entries of all rows to the pool: all that later drafts need of them.

        embedded   [T, hidden]: each row's token
        hidden     [T, hidden]: the vector before each row's token; any finite values at position 0
        """
        mixer = self._mixer
        normed = rms_norm_rows(self._joined(embedded, hidden), mixer.norm, self.chain.norm_eps, mixer.reads)
        self._attention.store(normed, context)

    def __call__(self, embedded: Tensor, hidden: Tensor, context: LayerContext) -> Tensor:
        """m [N, hidden] of a batch of decodes, each after position 0; their entries are written, too."""
        if context.batch.prefill is not None:
            raise ValueError("drafts are made one token a sequence at a time: no prefill rows")
        every_row = replace(context, batch=replace(context.batch, logit_rows=None))
        return self.chain(self._joined(embedded, hidden), every_row)

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        (T, D), eps = embedded.shape, self.chain.norm_eps
        joined = embedded.new_empty(T, 2 * D)
        rms_norm(embedded, self.embedding_norm, eps, joined[:, :D])
        rms_norm(hidden, self.hidden_norm, eps, joined[:, D:])
        return self.fc(joined)

    @property
    def _mixer(self) -> MixerBranch:
        mixer = self.chain.branches[0]
        assert isinstance(mixer, MixerBranch)
        return mixer

    @property
    def _attention(self) -> Attention:
        attention = self._mixer.mixer
        assert isinstance(attention, Attention)
        return attention


def shift_rows(
    hidden_T: Tensor, batch: ForwardBatch, previous_row: Tensor, vector_pool: Tensor, vector_tail: Tensor
) -> Tensor:
    """The vector [T, hidden] of the token before each row's; zeros at position 0. States' vectors advance.

    It is a convolution of two taps, of which the first is one and the second zero.

    hidden_T       each row's own
    previous_row   [hidden, 2]: these taps
    vector_pool    [num_slots, hidden, 1]: each state's last one
    vector_tail    [rows, places, hidden]: those of running sequences since their states were written
    """
    n, parts = batch.num_decodes, []
    for group in batch.decode_groups:
        rows, memory = hidden_T[group.rows], (vector_pool, vector_tail, group.tails)
        parts.append(causal_conv1d_tail_update(rows, previous_row, None, *memory, silu=False))
    if batch.prefill is not None:
        segments = batch.prefill.segments
        parts.append(causal_conv1d(hidden_T[n:], previous_row, None, vector_pool, segments, silu=False))
    return batch.join(parts)
