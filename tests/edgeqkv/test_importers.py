"""Every source format and variant: logits against an independent forward pass, facts as recorded."""

import json

import pytest
import torch

import edgeqkv
from edgeqkv.importers import read_checkpoint
from tests import upstream

PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


def check_logits(path, logits):
    """edgeqkv.load(path) within 1e-4 of the independent float64 forward pass; gives the spec."""
    model = edgeqkv.load(path)
    assert not model.training
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(0, upstream.VOCAB, (2, upstream.POSITIONS), generator=generator)
    expected = torch.stack([logits(row) for row in ids])
    got = model(ids)
    assert got.shape == (2, upstream.POSITIONS, upstream.VOCAB)
    assert expected.std() > 0.5  # weights of a size at which errors would show
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)
    return model.spec


def saved(tmp_path, checkpoint, **options):
    path = tmp_path / "ckpt.pt"
    torch.save(checkpoint, path, **options)
    return path


@pytest.mark.parametrize("variant", upstream.THREE)
def test_three_projections(tmp_path, variant):
    index = list(upstream.THREE).index(variant)
    prefix = PREFIXES[index % len(PREFIXES)]
    checkpoint, logits = upstream.three_projections(variant, prefix=prefix, seed=index)
    spec = check_logits(saved(tmp_path, checkpoint), logits)
    assert spec.label == variant
    assert spec.tie_word_embeddings
    assert spec.num_used_tokens is None


@pytest.mark.parametrize("variant", ["Q-MQA", "QKV", "Q=K=V"])
@pytest.mark.parametrize("options", [{"tied": False}, {"bias": False}, {"eps": 1e-2}])
def test_three_projections_options(tmp_path, variant, options):
    checkpoint, logits = upstream.three_projections(variant, **options)
    spec = check_logits(saved(tmp_path, checkpoint), logits)
    assert spec.tie_word_embeddings == options.get("tied", True)
    assert spec.linear_bias == options.get("bias", True)
    assert spec.layer_norm_bias
    assert spec.layer_norm_eps == options.get("eps", 1e-5)


@pytest.mark.parametrize("mode", upstream.WQKV)
@pytest.mark.parametrize(
    "options",
    [{}, {"tied": False}, {"bias": True}, {"prefix": "_orig_mod."}, {"scale": 0.1, "inner": 77}],
)
def test_wqkv(tmp_path, mode, options):
    checkpoint, logits = upstream.wqkv(mode, **options)
    spec = check_logits(saved(tmp_path, checkpoint), logits)
    assert spec.query_mode == {"original": "projected"}.get(mode, mode)
    assert spec.attention_scale == options.get("scale", 0.3)
    assert spec.intermediate_size == options.get("inner", 40)
    assert spec.tie_word_embeddings == options.get("tied", True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_nanogpt(tmp_path, bias, prefix):
    checkpoint, logits = upstream.nanogpt(bias=bias, prefix=prefix)
    spec = check_logits(saved(tmp_path, checkpoint), logits)
    assert (spec.label, spec.linear_bias, spec.layer_norm_bias) == ("QKV", bias, bias)


def test_a_wrapper_in_the_middle_of_names(tmp_path):
    checkpoint, logits = upstream.three_projections("Q-K=V")
    state = checkpoint["model_state_dict"]
    checkpoint["model_state_dict"] = {
        k.replace("attn.", "_orig_mod.attn."): v for k, v in state.items()
    }
    check_logits(saved(tmp_path, checkpoint), logits)


def test_the_format_before_zip_files(tmp_path):
    checkpoint, logits = upstream.three_projections("Q-MQA")
    path = saved(tmp_path, checkpoint, _use_new_zipfile_serialization=False)
    check_logits(path, logits)


def test_weights_are_mapped_not_read(tmp_path):
    """Writing into the file after reading shows in the tensors: nothing was copied."""
    checkpoint, _ = upstream.three_projections("QKV")
    path = saved(tmp_path, checkpoint)
    state = read_checkpoint(str(path)).state
    projections = [state[f"h.0.attn.{n}_proj.weight"] for n in "qkv"]
    storages = {p.untyped_storage().data_ptr() for p in projections}
    assert len(storages) == 1
    original = checkpoint["model_state_dict"]["h.0.attn.c_attn.weight"].numpy().tobytes()
    data = path.read_bytes()
    with path.open("r+b") as f:
        f.seek(data.index(original))
        f.write(torch.tensor([123.0]).numpy().tobytes())
    assert projections[0][0, 0] == 123.0


def test_half_precision_weights_are_kept_and_load_as_float32(tmp_path):
    checkpoint, _ = upstream.three_projections("Q-K=V")
    state = checkpoint["model_state_dict"]
    checkpoint["model_state_dict"] = {k: v.bfloat16() for k, v in state.items()}
    path = saved(tmp_path, checkpoint)
    assert {t.dtype for t in read_checkpoint(str(path)).state.values()} == {torch.bfloat16}
    assert edgeqkv.load(path)(torch.tensor([[1, 2]])).dtype == torch.float32


def inferences(tmp_path, checkpoint):
    return " | ".join(read_checkpoint(str(saved(tmp_path, checkpoint))).inferences)


def test_every_inference_is_recorded(tmp_path):
    checkpoint, _ = upstream.three_projections("Q-GQA-2")
    config = checkpoint["model_config"]
    for key in ("n_kv_groups", "use_bias", "tie_word_embeddings"):
        del config[key]
    config["rotary_pct"] = 0
    said = inferences(tmp_path, checkpoint)
    assert "2 mask buffers dropped" in said
    assert (
        "num_key_value_heads 2: n_kv_groups is not recorded, h.0.attn.c_k.weight is [16, 32]"
        in said
    )
    assert "bias true: use_bias is not recorded" in said
    assert "tie_word_embeddings true: tie_word_embeddings is not recorded" in said
    assert "lm_head.weight is absent" in said
    assert "variant Q-GQA-2: from c_k + c_q, their shapes and n_head 4" in said
    assert "not known and not used: rotary_pct" in said


def test_gpt2_vocabulary_is_recognised_by_its_size(tmp_path):
    checkpoint, _ = upstream.nanogpt(bias=False)
    wte = torch.zeros(50304, upstream.WIDTH)
    checkpoint["model"]["transformer.wte.weight"] = checkpoint["model"]["lm_head.weight"] = wte
    checkpoint["model_args"]["vocab_size"] = 50304
    imported = read_checkpoint(str(saved(tmp_path, checkpoint)))
    assert imported.spec.num_used_tokens == 50257
    assert any(i.startswith("num_used_tokens 50257") for i in imported.inferences)


def test_an_untied_nanogpt_is_inferred_from_its_head(tmp_path):
    checkpoint, _ = upstream.nanogpt(bias=False)
    checkpoint["model"]["lm_head.weight"] = checkpoint["model"]["lm_head.weight"] + 1
    imported = read_checkpoint(str(saved(tmp_path, checkpoint)))
    assert not imported.spec.tie_word_embeddings
    assert any("lm_head.weight is unlike" in i for i in imported.inferences)


def test_head_size_follows_the_weights(tmp_path):
    """The code of arXiv 2510.23912 splits n_embd evenly whatever head_size (default 64) says."""
    checkpoint, logits = upstream.wqkv("identity")
    checkpoint["model_args"]["head_size"] = 64
    path = saved(tmp_path, checkpoint)
    assert check_logits(path, logits).head_dim == upstream.DIM
    assert any("head_size 64 is not used" in i for i in read_checkpoint(str(path)).inferences)


def plus(checkpoint, features=10):
    from tests.edgeqkv.test_model import features_by_loops

    state = checkpoint["model_state_dict"]
    for i in range(upstream.LAYERS):
        state[f"h.{i}.attn.pos_w"] = torch.randn(
            features, generator=torch.Generator().manual_seed(i)
        )
        state[f"h.{i}.attn.pos_b"] = torch.tensor([0.1])
        state[f"h.{i}.attn.pos2d"] = torch.from_numpy(features_by_loops(30, features)).float()
        del state[f"h.{i}.attn.bias"]
    return checkpoint


@pytest.mark.parametrize("features", [10, 7])
def test_the_plus_term(tmp_path, features):
    checkpoint = plus(upstream.three_projections("Q=K-V")[0], features)
    imported = read_checkpoint(str(saved(tmp_path, checkpoint)))
    assert imported.spec.label == "(Q=K-V)+"
    assert not imported.spec.is_causal
    assert imported.spec.score_position_features == features
    expected = checkpoint["model_state_dict"]["h.1.attn.pos_w"]
    torch.testing.assert_close(imported.state["h.1.attn.pos_w"], expected)
    assert any(i.startswith("is_causal false") for i in imported.inferences)


def test_inferences_are_json(tmp_path):
    checkpoint, _ = upstream.wqkv("residual")
    json.dumps(read_checkpoint(str(saved(tmp_path, checkpoint))).inferences)
