"""MODEL_DIR in Hugging Face transformers: the same logits, tokens and cache layout."""

import subprocess
import sys

import pytest
import torch

import edgeqkv
from edgeqkv.errors import EdgeQKVError
from edgeqkv.model_dir import save_model_dir
from edgeqkv.perplexity import evaluate
from edgeqkv.tokenizer import byte_tokenizer, load_tokenizer
from tests import variants


def test_without_transformers_the_error_names_the_extra():
    code = "import sys; sys.modules['transformers'] = None; import edgeqkv.hf"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDependencyError" in result.stderr
    assert "pip install 'edgeqkv[hf]'" in result.stderr


def test_another_version_of_transformers_is_refused():
    """Version 5 loads and then generates other tokens."""
    pytest.importorskip("transformers")
    code = "import transformers; transformers.__version__ = '5.24.0'; import edgeqkv.hf"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDependencyError: edgeqkv.hf needs transformers 4.57, found 5.24.0" in (
        result.stderr.replace("edgeqkv.errors.", "")
    )


@pytest.fixture
def auto():
    """Import transformers and our registration, or skip."""
    transformers = pytest.importorskip("transformers")
    import edgeqkv.hf  # noqa: F401

    return transformers


def model_dir(folder, spec, tokenizer=None):
    decoder = variants.random_decoder(spec)
    save_model_dir(
        folder, spec, decoder.state_dict(), {"source": "a test"}, tokenizer_json=tokenizer
    )
    return decoder


def greedy(decoder, ids, steps):
    """[S] -> [S + steps], the whole sequence run again for every token; spare ids left out."""
    for _ in range(steps):
        best = decoder(ids[None])[0, -1, : decoder.spec.used_tokens].argmax()
        ids = torch.cat([ids, best[None]])
    return ids


def prompt(length, seed=3):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", variants.CAUSAL)
def test_generates_what_the_eager_model_generates(tmp_path, auto, name):
    decoder = model_dir(tmp_path / "model", variants.CAUSAL[name])
    model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = prompt(7)
    with torch.no_grad():
        out = model(ids[None])
    torch.testing.assert_close(out.logits, decoder(ids[None]), atol=1e-4, rtol=0)
    expected = greedy(decoder, ids, 20)
    for use_cache in (True, False):
        got = model.generate(ids[None], max_new_tokens=20, do_sample=False, use_cache=use_cache)
        assert got[0].tolist() == expected.tolist()


def test_one_cache_tensor_per_layer_where_key_is_value(tmp_path, auto):
    for name, shared in (("q-mqa", True), ("mqa", False)):
        model_dir(tmp_path / name, variants.CAUSAL[name])
        model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        beams = model.generate(
            prompt(5)[None], max_new_tokens=6, num_beams=3, return_dict_in_generate=True
        )
        with torch.no_grad():
            caches = [beams.past_key_values, model(prompt(5)[None]).past_key_values]
        for cache in caches:
            assert len(cache.layers) == 2
            for layer in cache.layers:
                assert (layer.keys is layer.values) is shared
                assert layer.keys.shape[1:] == (1, cache.get_seq_length(), 16)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(tmp_path, auto, side):
    decoder = model_dir(tmp_path / "model", variants.CAUSAL["q-gqa"])
    model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    rows = [prompt(4, seed=1), prompt(9, seed=2)]
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(9 - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    for i, row in enumerate(rows):
        expected = decoder(row[None])[0]
        torch.testing.assert_close(logits[i, mask[i] == 1], expected, atol=1e-4, rtol=0)
    if side == "left":
        got = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        for i, row in enumerate(rows):
            assert got[i, 9:].tolist() == greedy(decoder, row, 12)[len(row) :].tolist()


def test_spare_ids_are_never_sampled(tmp_path, auto):
    spec = variants.spec(qkv_sharing="k=v", tie_word_embeddings=False, vocab_size=128)
    decoder = variants.random_decoder(spec)
    state = decoder.state_dict()
    state["lm_head.weight"][spec.used_tokens :] = 4 * state["lm_head.weight"][:31]
    save_model_dir(tmp_path / "model", spec, state, {})
    model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    given = auto.GenerationConfig(do_sample=True, temperature=5.0, top_k=0, max_new_tokens=30)
    for config in (None, given):
        got = model.generate(prompt(5)[None], config, max_new_tokens=30, do_sample=True, top_k=0)
        assert int(got.max()) < spec.used_tokens
    with torch.no_grad():  # they would be: most of the probability is theirs
        probabilities = model(prompt(30)[None]).logits.softmax(-1)
    assert probabilities[..., spec.used_tokens :].sum(-1).mean() > 0.5


def test_loss_trains_and_save_pretrained_writes_a_model_dir(tmp_path, auto):
    decoder = model_dir(tmp_path / "model", variants.CAUSAL["untied-tanh"])
    model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = prompt(20)[None]
    out = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(decoder(ids)[0, :-1], ids[0, 1:])
    torch.testing.assert_close(out.loss, expected, atol=1e-4, rtol=0)
    out.loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
        assert model(ids, labels=ids).loss < out.loss
        trained = model(ids).logits
    model.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(edgeqkv.load(tmp_path / "again")(ids), trained, atol=1e-4, rtol=0)


def test_tokenizers(tmp_path, auto):
    codec = byte_tokenizer()
    model_dir(tmp_path / "byte", variants.spec(vocab_size=256), codec.to_str())
    found = auto.AutoTokenizer.from_pretrained(tmp_path / "byte")
    text = "Löwe,\n\tĀ 🦁"
    assert found(text)["input_ids"] == list(text.encode())
    assert found.decode(list(text.encode())) == text
    codec.add_special_tokens(["<|endoftext|>"])
    model_dir(tmp_path / "gpt2", variants.spec(vocab_size=257, num_used_tokens=257), codec.to_str())
    found = auto.AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    assert (found.eos_token_id, found.pad_token_id, len(found)) == (256, 256, 257)
    padded = found(["a", "bc"], padding=True, return_tensors="pt")
    assert padded["attention_mask"].sum() == 3
    assert load_tokenizer(tmp_path / "gpt2").to_str() == codec.to_str()


def test_lm_eval_scores_what_the_eager_model_scores(tmp_path, auto):
    reason = "lm-eval is not in the dev extra: it brings datasets and pyarrow"
    found = pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    from lm_eval.api.instance import Instance

    codec = byte_tokenizer()
    codec.add_special_tokens(["<|endoftext|>"])
    decoder = model_dir(
        tmp_path / "model", variants.spec(vocab_size=257, num_used_tokens=257), codec.to_str()
    )
    lm = found.HFLM(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", batch_size=3)
    context = decoder.spec.max_position_embeddings
    text = ("In the beginning was the Word. " * 9)[: 3 * context]

    def requests(kind, *arguments):
        return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]

    (rolling,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    ours = evaluate(decoder, codec, "<|endoftext|>" + text)
    assert ours["tokens"] == 3 * context
    assert rolling == pytest.approx(-ours["loss"] * ours["tokens"], rel=1e-5)
    pairs = [("In the", " end"), ("", "alone"), ("A longer beginning than", " others")]
    got = lm.loglikelihood(requests("loglikelihood", *pairs))
    for (before, after), (total, greedy_one) in zip(pairs, got, strict=True):
        ids = torch.tensor([*(before.encode() or [256]), *after.encode()])
        with torch.no_grad():
            rows = decoder(ids[None])[0, -len(after) - 1 : -1].log_softmax(-1)
        targets = ids[-len(after) :]
        assert total == pytest.approx(float(rows[range(len(after)), targets].sum()), rel=1e-5)
        assert greedy_one == bool((rows.argmax(-1) == targets).all())


def test_refusals(tmp_path, auto):
    model_dir(tmp_path / "plus", variants.NON_CAUSAL["(q=k-v)+"])
    with pytest.raises(EdgeQKVError, match="is not causal"):
        auto.AutoModelForCausalLM.from_pretrained(tmp_path / "plus")
    model_dir(tmp_path / "model", variants.CAUSAL["q-mqa"])
    model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(EdgeQKVError, match="context overflow: 65 tokens"):
        model.generate(prompt(60)[None], max_new_tokens=9)
    with pytest.raises(EdgeQKVError, match=r"attention_mask is \[1, 3\]"):
        model(prompt(4)[None], attention_mask=torch.ones(1, 3))
