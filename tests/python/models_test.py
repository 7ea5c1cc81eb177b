"""Models of transformers and diffusers, small and from their configs: by Hilt they lose and learn as by torch."""

import unittest

import diffusers
import hilt.diffusers
import hilt.transformers
import support
import torch
import transformers
from hilt import _torch
from transformers import masking_utils

hilt.transformers.register()
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 61, "max_position_embeddings": 256}


class Asked:
    """What hilt.attention is asked for while it stands."""

    def __enter__(self):
        self.calls, self.real = [], _torch.hilt_attention

        def attention(*tensors, **options):
            self.calls.append({n: x for n, x in options.items() if x is not None and n not in ("scale", "layout")})
            return self.real(*tensors, **options)

        _torch.hilt_attention = attention
        return self.calls

    def __exit__(self, *_):
        _torch.hilt_attention = self.real


def decoder(kind="Llama", **options):
    torch.manual_seed(1)
    config = getattr(transformers, kind + "Config")(**SMALL, **options)
    return getattr(transformers, kind + "ForCausalLM")(config)


class Transformers(unittest.TestCase):
    def alike(self, model, near=2e-6, **inputs):
        """By both: loss, gradients; and what Hilt was asked for in each layer."""
        results = []
        for how in ("sdpa", "hilt"):
            model.set_attn_implementation(how)
            model.zero_grad()
            torch.manual_seed(3)
            with Asked() as calls:
                loss = model(**inputs).loss
                loss.backward()
            results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
            self.assertEqual(bool(calls), how == "hilt")
        (want, want_d), (got, got_d) = results
        torch.testing.assert_close(got, want, rtol=near, atol=near)
        self.assertEqual(got_d.keys(), want_d.keys())
        for name, d in want_d.items():
            torch.testing.assert_close(got_d[name], d, rtol=1e-4, atol=near, msg=lambda m: f"{name}: {m}")
        return calls

    def ids(self, batch=2, length=24):
        return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(2))

    def test_llama(self):
        model, ids = decoder(num_key_value_heads=2), self.ids()
        self.assertEqual(self.alike(model, input_ids=ids, labels=ids), [{"causal": True}] * 2)

    def test_padding_becomes_documents(self):
        model, ids = decoder(num_key_value_heads=2), self.ids(3)
        for name, rows, documents in (
            ("left", [24, 17, 9], [[24], [7, 17], [15, 9]]),
            ("right", [24, 17, 9], [[24], [17, ...], [9, ...]]),
        ):
            tokens = torch.arange(24).expand(3, 24)
            lengths = torch.tensor(rows)[:, None]
            mask = tokens >= 24 - lengths if name == "left" else tokens < lengths
            calls = self.alike(model, input_ids=ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100))
            self.assertEqual(calls, [{"causal": True, "documents": documents}] * 2)
        holes = torch.rand(3, 24, generator=torch.Generator().manual_seed(2)) < 0.7
        holes[:, 0] = True
        labels = ids.masked_fill(~holes, -100)
        bias, = {tuple(c["bias"].shape) for c in self.alike(model, input_ids=ids, attention_mask=holes, labels=labels)}
        self.assertEqual(bias, (3, 1, 1, 24))  # keys alone, for all queries

    def test_packed_rows_become_documents(self):
        model, ids = decoder(num_key_value_heads=2), self.ids()
        positions = torch.tensor([[*range(10), *range(14)], [*range(4), *range(15), *range(5)]])
        calls = self.alike(model, input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
        self.assertEqual(calls, [{"causal": True, "documents": [[10, 14], [4, 15, 5]]}] * 2)

    def test_windows(self):
        model, ids = decoder("Mistral", num_key_value_heads=2, sliding_window=6), self.ids()
        calls = self.alike(model, input_ids=ids, labels=ids)
        self.assertEqual(calls, [{"causal": True, "pattern": "slide:5"}] * 2)
        mask = torch.arange(24).expand(2, 24) >= torch.tensor([[0], [5]])
        calls = self.alike(model, input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~mask, -100))
        self.assertEqual(calls, [{"causal": True, "pattern": "slide:5", "documents": [[24], [5, 19]]}] * 2)

    def test_terms(self):
        """A soft cap, as Gemma 2 has, and sinks, as gpt-oss: "eager" is what they are compared with there."""
        q, k, v = [x.transpose(1, 2) for x in support.inputs(16)]
        sink = torch.tensor([0.5, -1.0], dtype=torch.float64)
        module = torch.nn.Module()
        o, _ = hilt.transformers._attend(module, q, k, v, None, softcap=2.0, s_aux=sink, scaling=0.3)
        want, _ = support.attention(*[x.transpose(1, 2) for x in (q, k, v)], support.mask(16, lambda t, u: u <= t),
                                    scale=0.3, softcap=2.0, sink=sink)
        torch.testing.assert_close(o, want)
        o, _ = hilt.transformers._attend(module, q, k, v, None, position_bias=torch.ones(1, 2, 16, 16).double().tril())
        want, _ = support.attention(*[x.transpose(1, 2) for x in (q, k, v)], support.mask(16, lambda t, u: u <= t),
                                    add=torch.ones(1, 2, 16, 16).double())
        torch.testing.assert_close(o, want)

    def test_no_mask_is_dropped(self):
        """What is none of its own it takes as it is, and what is looked at by others is the mask."""
        model, ids = decoder(num_key_value_heads=2), self.ids()
        own = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(4)) < 0.5
        own |= torch.eye(24, dtype=torch.bool)
        for mask in (own, torch.zeros(2, 1, 24, 24).masked_fill(~own, torch.finfo(torch.float32).min)):
            calls = self.alike(model, input_ids=ids, attention_mask=mask, labels=ids)
            self.assertEqual({tuple(c["bias"].shape) for c in calls}, {(2, 1, 24, 24)})
        embeds = torch.zeros(2, 24, 32)
        every = {}
        for how in ("sdpa", "hilt"):
            model.set_attn_implementation(how)
            every[how] = [
                masking_utils.create_causal_mask(
                    model.config, embeds, None, None, and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0),
                masking_utils.create_chunked_causal_mask(
                    _with(model.config, attention_chunk_size=6), embeds, None, None),
                masking_utils.create_sliding_window_causal_mask(
                    _with(model.config, sliding_window=4), embeds, torch.arange(24).expand(2, 24) > 3, None),
                masking_utils.create_bidirectional_mask(model.config, embeds, torch.arange(24).expand(2, 24) < 9),
            ]
        for i, (want, got) in enumerate(zip(every["sdpa"], every["hilt"])):
            self.assertEqual(hasattr(got, "options"), i > 1)
            self.assertTrue(torch.equal(got & True, want.expand(got.shape)))

    def test_generate(self):
        for options in ({}, {"sliding_window": 6}):
            model = decoder("Mistral", num_key_value_heads=2, eos_token_id=None, pad_token_id=0, **options).eval()
            for length, cache in ((9, {}), (9, {"cache_implementation": "static"}), (1, {})):
                ids = self.ids(length=length)
                mask = (torch.arange(length).expand(2, length) >= torch.tensor([[0], [length // 3]])).long()
                texts = []
                for how in ("sdpa", "hilt"):
                    model.set_attn_implementation(how)
                    texts.append(model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **cache))
                self.assertTrue(torch.equal(*texts), (options, length, cache))

    def test_a_cache_goes_on(self):
        """A second part of several tokens: its queries are the last."""
        model, ids = decoder(num_key_value_heads=2).eval(), self.ids()
        for cache in (transformers.DynamicCache, lambda: transformers.StaticCache(model.config, max_cache_len=40)):
            parts = []
            for how in ("sdpa", "hilt"):
                model.set_attn_implementation(how)
                kept = cache()
                parts.append([model(ids[:, a:b], past_key_values=kept).logits for a, b in ((0, 9), (9, 20), (20, 21))])
            for got, want in zip(*parts):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    def test_an_encoder_and_a_decoder(self):
        torch.manual_seed(1)
        config = transformers.BartConfig(
            vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, max_position_embeddings=64)
        model = transformers.BartForConditionalGeneration(config)
        for there in (7, 12, 24):  # fewer keys than queries, as many, and more
            ids, source = self.ids(length=12), self.ids(length=there)
            mask = torch.arange(there).expand(2, there) < torch.tensor([[there], [there - 3]])
            self.alike(model, input_ids=source, attention_mask=mask, labels=ids)

    def test_vit(self):
        torch.manual_seed(1)
        config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32,
                                        intermediate_size=48, patch_size=4, num_labels=5)
        model = transformers.ViTForImageClassification(config)
        calls = self.alike(model, pixel_values=torch.rand(2, 3, 32, 32), labels=torch.tensor([1, 4]))
        self.assertEqual(calls, [{}] * 2)

    def test_dropout_is_of_torchs_generator(self):
        model, ids = decoder(num_key_value_heads=2, attention_dropout=0.5).train(), self.ids()
        model.set_attn_implementation("hilt")
        losses = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            with Asked() as calls:
                losses.append(model(ids, labels=ids).loss.item())
            self.assertEqual(len({int(c["seed"]) for c in calls}), 2)
        self.assertEqual(losses[0], losses[1])
        self.assertNotEqual(losses[0], losses[2])
        model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        model(ids, labels=ids).loss.backward()
        kept = [p.grad.clone() for p in model.parameters()]
        model.gradient_checkpointing_disable()
        model.zero_grad()
        torch.manual_seed(1)
        model(ids, labels=ids).loss.backward()
        for a, p in zip(kept, model.parameters()):
            torch.testing.assert_close(a, p.grad)

    def test_compiled(self):
        model, ids = decoder(num_key_value_heads=2), self.ids()
        model.set_attn_implementation("hilt")
        for mask in (None, torch.arange(24).expand(2, 24) >= torch.tensor([[0], [5]])):
            torch._dynamo.reset()
            want = model(ids, attention_mask=mask).logits
            got = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, attention_mask=mask).logits
            seen = torch.ones(2, 24, dtype=torch.bool) if mask is None else mask
            torch.testing.assert_close(got[seen], want[seen], rtol=1e-5, atol=1e-5)

    def test_compiled_with_dropout(self):
        model, ids = decoder(num_key_value_heads=2, attention_dropout=0.5).train(), self.ids()
        model.set_attn_implementation("hilt")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        losses = []
        for f, seed in ((compiled, 1), (compiled, 1), (compiled, 2), (model, 1)):
            torch.manual_seed(seed)
            losses.append(f(ids, labels=ids).loss)
            losses[-1].backward()
        self.assertEqual(losses[0], losses[1])
        self.assertNotEqual(losses[0], losses[2])
        torch.testing.assert_close(losses[0], losses[3])


def _with(config, **more):
    for name, x in more.items():
        setattr(config, name, x)
    return config


class Diffusers(unittest.TestCase):
    def alike(self, make, *inputs, **options):
        torch.manual_seed(1)
        model = make()
        results = []
        for change in (lambda m: m, hilt.diffusers.use):
            model = change(model)
            model.zero_grad()
            with Asked() as calls:
                y = model(*inputs, **options).sample
                y.square().sum().backward()
            results.append([y.detach()] + [p.grad for p in model.parameters() if p.grad is not None])
        self.assertEqual(len(results[0]), len(results[1]))
        for want, got in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        return calls

    def test_unet(self):
        def make():
            return diffusers.UNet2DConditionModel(
                sample_size=8, block_out_channels=(32, 32), layers_per_block=1, cross_attention_dim=24,
                attention_head_dim=8, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))

        x, text = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 24)
        calls = self.alike(make, x, torch.tensor([3, 5]), text)
        self.assertEqual({tuple(c) for c in calls}, {()})
        mask = torch.arange(7).expand(2, 7) < torch.tensor([[7], [4]])
        calls = self.alike(make, x, torch.tensor([3, 5]), text, encoder_attention_mask=mask)
        self.assertEqual({tuple(c["bias"].shape)[2:] for c in calls if c}, {(1, 7)})

    def test_dit(self):
        def make():
            return diffusers.DiTTransformer2DModel(
                sample_size=8, num_layers=2, num_attention_heads=2, attention_head_dim=8, in_channels=4, patch_size=2,
                num_embeds_ada_norm=10).eval()

        self.assertTrue(self.alike(make, torch.randn(2, 4, 8, 8), timestep=torch.tensor([3, 5]),
                                   class_labels=torch.tensor([1, 2])))

    def test_what_is_used(self):
        """A pipeline's models; and where nothing would be replaced, a sentence."""
        unet = diffusers.UNet2DModel(sample_size=8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
                                     attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                     up_block_types=("AttnUpBlock2D", "UpBlock2D"))
        pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=4))
        pictures = []
        for change in (lambda p: p, hilt.diffusers.use):
            pipeline = change(pipeline)
            pipeline.set_progress_bar_config(disable=True)
            with Asked() as calls:
                pictures.append(torch.tensor(pipeline(generator=torch.Generator().manual_seed(1), num_inference_steps=2,
                                                      output_type="np").images))
        torch.testing.assert_close(*pictures, rtol=1e-4, atol=1e-4)
        self.assertTrue(calls)
        with self.assertRaisesRegex(hilt.Error, "in this Linear is no module with a `processor`"):
            hilt.diffusers.use(torch.nn.Linear(2, 2))


class Sdpa(unittest.TestCase):
    def test_as_torch(self):
        g = torch.Generator().manual_seed(1)

        def tensors(heads, kv_heads, rows, keys, dim, wide):
            shapes = (2, heads, rows, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, wide)
            return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]

        torchs = torch.nn.functional.scaled_dot_product_attention
        for sizes in ((4, 4, 12, 12, 8, 8), (4, 2, 12, 12, 8, 8), (4, 4, 5, 12, 8, 8), (4, 4, 12, 5, 8, 8),
                      (4, 4, 12, 12, 8, 6), (4, 4, 12, 12, 6, 8)):
            rows, keys = sizes[2:4]
            mask = torch.rand(2, 1, rows, keys, generator=g) < 0.6
            mask[..., 0] = True
            for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask[:, :, :1]},
                            {"attn_mask": mask.double(), "scale": 0.2}):
                x = tensors(*sizes)
                options["enable_gqa"] = sizes[0] != sizes[1]
                if "is_causal" in options and rows > keys:  # queries that have no place among the keys
                    with self.assertRaisesRegex(hilt.Error, "neither causal"):
                        _torch.sdpa(*x, **options)
                    continue
                want, got = torchs(*x, **options), _torch.sdpa(*x, **options)
                torch.testing.assert_close(got, want)
                for a, b in zip(*[torch.autograd.grad(y.sin().sum(), x) for y in (got, want)]):
                    torch.testing.assert_close(a, b)


if __name__ == "__main__":
    unittest.main()
