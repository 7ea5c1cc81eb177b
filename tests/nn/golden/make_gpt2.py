#!/usr/bin/env python3
"""Writes the fixture of gpt2_test.cpp: a tiny GPT-2 with random weights and its logits, from Hugging Face's
implementation.

    make_gpt2.py DIR        needs torch, numpy, safetensors and transformers

gpt2.safetensors        weights, as save_pretrained names them
gpt2_tokens.npy         i64 [2, 16]
gpt2_logits.npy         f32 [2, 16, 61]
"""
import pathlib
import sys

import numpy
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

directory = pathlib.Path(sys.argv[1])
torch.manual_seed(20)
config = GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0,
                    attn_implementation="eager", bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        # Far from their initial values, so that no bias, scale or transpose can be wrong unnoticed.
        parameter.copy_(torch.randn_like(parameter) * 0.2
                        + (1 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) else 0))
    tokens = torch.randint(0, config.vocab_size, (2, config.n_positions))
    logits = model(tokens).logits
weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
save_file(weights, directory / "gpt2.safetensors", metadata={"format": "pt"})
numpy.save(directory / "gpt2_tokens.npy", tokens.numpy())
numpy.save(directory / "gpt2_logits.npy", logits.numpy())
