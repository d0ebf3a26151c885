"""The redundancy map against numpy, and on a model."""

import math

import numpy as np
import torch
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.research.redundancy import Probe, divergence, measure, queries_and_keys
from agentsd_eval.research.settings import RedundancySettings
from callers import ddim
from tiny import snapshot


def test_the_divergence_is_equation_5():
    rng = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 9, 4, dtype=torch.float64, generator=rng) for _ in range(2))
    query[0, 0] *= 100  # it attends to one key alone
    pairs = torch.tensor([[0, 3, 5], [1, 3, 8]])
    found = divergence(query, key, pairs).numpy()
    for m in range(2):
        logits = query[m].numpy() @ key[m].numpy().T
        attention = np.exp(logits - logits.max(1, keepdims=True))
        attention /= attention.sum(1, keepdims=True)
        for n, (i, j) in enumerate(pairs.T.tolist()):
            p, q = attention[i], attention[j]
            mean = (p + q) / 2
            kl = [sum(a * math.log(a / b) for a, b in zip(x, mean, strict=True) if a > 0) for x in (p, q)]
            np.testing.assert_allclose(found[m, n], sum(kl) / 2, atol=1e-12)
    apart = divergence(torch.eye(2)[None] * 1e3, torch.eye(2)[None], torch.tensor([[0], [1]]))
    np.testing.assert_allclose(float(apart), math.log(2), rtol=1e-6)


def test_queries_and_keys_are_the_layers_own(pipe):
    attn = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    tokens = torch.randn(1, 16, attn.to_q.in_features)
    query, key = queries_and_keys(attn, tokens)
    expected = attn.head_to_batch_dim(attn.to_q(tokens)), attn.head_to_batch_dim(attn.to_k(tokens))
    torch.testing.assert_close(
        (query @ key.mT).softmax(-1), attn.get_attention_scores(*expected), atol=1e-6, rtol=1e-5
    )


def test_a_row_for_each_level_and_no_trace(pipe):
    pipe.scheduler = ddim()
    before = snapshot(pipe.unet)
    settings = RedundancySettings(model="demo", scheduler="model", steps=6)
    done = []
    rows = measure(pipe, from_prompts(["a cat", "a dog"], 2, 0), settings, lambda: done.append(1))
    assert [row["tokens"] for row in rows] == sorted({row["tokens"] for row in rows}, reverse=True)
    assert all(len(row["scores"]) == 6 and 0 <= min(row["scores"]) < math.log(2) for row in rows)
    assert [round(row["last third"], 9) for row in rows] == [
        round(sum(row["scores"][4:]) / 2, 9) for row in rows
    ]
    assert len(done) == 2
    assert snapshot(pipe.unet) == before


def test_the_conditional_pass_is_looked_at(pipe):
    attn = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    both = torch.randn(2, 16, attn.to_q.in_features)
    scores = []
    for tokens in (both, both[1:], both[:1]):
        probe = Probe(0)
        probe.look(attn, (tokens,))
        scores += probe.scores[16][-1]
    assert scores[0] == scores[1] != scores[2]
