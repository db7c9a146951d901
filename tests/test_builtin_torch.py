"""The torch implementation that trained the built-in checkpoint, held against the engine.

It needs torch, which the extra `train` installs; without it every test here is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_cli.builtin import ROOT
from kimi_cli.repack import repack
from kimi_cli.tokenizer import Tokenizer
from tests import running
from tests.reference_model import mxfp4, read_tensors

torch = pytest.importorskip("torch", reason="torch is absent: pip install -e '.[train]'")

from tests.builtin import kda, model, pieces, quantise, shape  # noqa: E402
from tests.builtin.export import write_shards  # noqa: E402

VOCAB = 512
LOGIT_BOUND = 1e-3
"""What separates rounding from a mistake, for logits of standard deviation 4 or less."""


def spread_out(text: dict[str, Any], seed: int) -> dict[str, Any]:
    """Parameters in which nothing is at a value, such as 1 or 0, that would hide a mistake."""
    random = torch.Generator().manual_seed(seed)
    parameters = shape.initial(text, seed)
    for name, p in parameters.items():
        noise = torch.randn(p.shape, generator=random)
        if name.endswith("norm.weight"):
            p += 0.2 * noise
        elif name.endswith(("res_proj.weight", "A_log", "correction_bias")):
            p += 0.05 * noise
    parameters["lm_head.weight"] *= 10
    return parameters


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Any]:
    """A checkpoint of the trained model's shape, its config and its weights as stored."""
    directory = tmp_path_factory.mktemp("exported")
    config = shape.config(VOCAB)
    (directory / "config.json").write_text(json.dumps(config))
    parameters = spread_out(config["text_config"], 3)
    write_shards(directory, config["text_config"], parameters)
    repack(directory)
    stored = {name: quantise.stored(name, p) for name, p in parameters.items()}
    return directory, config, stored


def test_the_torch_model_and_the_engine_agree(exported: tuple[Path, dict[str, Any], Any]) -> None:
    directory, config, stored = exported
    text = config["text_config"]
    ids = np.random.default_rng(5).integers(0, VOCAB, 48).tolist()
    found = running.run(running.Source.open(directory), ids)
    with torch.no_grad():
        out = model.forward(stored, text, torch.tensor([ids]))
        logits = (out.hidden[0] @ stored["lm_head.weight"].T).numpy()
    assert np.abs(found.logits - logits).max() < LOGIT_BOUND
    assert logits.std() > 1
    for layer, routing in out.routing.items():
        for position, chosen in enumerate(routing.chosen.tolist()):
            engine = found.routed[layer, position][0]
            assert sorted(engine) == sorted(chosen), (layer, position)


def test_the_chunked_form_is_the_recurrence() -> None:
    random = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Any:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    q, k, v = (draw(2, 3, 61, 32) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    k[:, :, 10:20] = k[:, :, 10:11]  # the same key again and again
    g = -5 * torch.sigmoid(draw(2, 3, 61, 32) * 4)
    g[:, :, 30:50] = -4.9999  # the strongest decay, through chunks
    inputs = [x.requires_grad_() for x in (q, k, v, g, torch.sigmoid(draw(2, 3, 61)))]
    weight = draw(2, 3, 61, 32)
    pairs = []
    for form in (kda.recurrent, kda.chunked):
        out = form(*inputs)
        pairs.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for plain, fast in zip(*pairs, strict=True):
        assert torch.allclose(plain, fast, rtol=1e-9, atol=1e-12)
    single = kda.chunked(*(x.detach().float() for x in inputs))
    assert (single - pairs[0][0]).abs().max() < 1e-5


def test_the_fused_pieces_are_the_plain_ones() -> None:
    fused = pytest.importorskip("tests.builtin.fused", reason="no gcc")
    text = shape.config(VOCAB)["text_config"]
    parameters = spread_out(text, 7)
    for name, p in parameters.items():
        p.requires_grad_("correction_bias" not in name)
    ids = torch.randint(0, VOCAB, (2, 65), generator=torch.Generator().manual_seed(2))
    ids, wanted = ids[:, :-1], ids[:, 1:].flatten()
    losses, gradients = [], []
    for ops, mean in ((pieces, None), (fused, fused.mean_entropy)):
        out = model.forward(parameters, text, ids, ops)
        logits = out.hidden.flatten(0, 1) @ parameters["lm_head.weight"].T
        loss = mean(logits, wanted) if mean else pieces.entropy(logits, wanted).mean()
        names = [
            n
            for n, p in parameters.items()
            if p.requires_grad and "layers.0.self_attention" not in n
        ]
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, [parameters[n] for n in names]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, plain, fast in zip(names, *gradients, strict=True):
        assert (plain - fast).norm() < 1e-3 * plain.norm() + 1e-7, name


def test_mxfp4_rounds_to_the_nearest_and_codes_say_the_same() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    weight[3] = 0
    weight[5, :32] *= 1e-20
    codes, exponents = quantise.mxfp4_codes(weight)
    table = torch.tensor([*quantise.MAGNITUDES, *(-m for m in quantise.MAGNITUDES)])
    decoded = table[codes.long()].unflatten(-1, (-1, 32)) * 2.0 ** exponents[..., None].double()
    assert torch.equal(decoded.flatten(-2).float(), quantise.mxfp4(weight))
    scale = (2.0 ** exponents.double()).repeat_interleave(32, -1)
    nearest = (weight.double()[..., None] / scale[..., None] - table.double()).abs().amin(-1)
    error = (weight.double() / scale - table[codes.long()].double()).abs()
    assert torch.allclose(error, nearest)


def test_muon_makes_singular_values_near_one() -> None:
    from tests.builtin.optimise import orthogonal

    random = torch.Generator().manual_seed(6)
    for rows, columns in ((96, 32), (32, 96)):
        x = torch.randn(3, rows, columns, generator=random)
        values = torch.linalg.svdvals(orthogonal(x))
        assert values.min() > 0.3 and values.max() < 1.4


def test_the_shipped_checkpoint_is_the_same_in_torch_and_in_the_engine() -> None:
    directory = ROOT / "psalm"
    config = json.loads((directory / "config.json").read_text("utf-8"))
    text = config["text_config"]
    weights = load_weights(directory, text)
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode("Psalm 23\nThe LORD is my shepherd; I shall not want.\nHe maketh me to")
    found = running.run(running.Source.open(directory), ids)
    with torch.no_grad():
        out = model.forward(weights, text, torch.tensor([ids]))
        logits = (out.hidden[0] @ weights["lm_head.weight"].T).numpy()
    assert np.abs(found.logits - logits).max() < LOGIT_BOUND
    for layer, routing in out.routing.items():
        for position, chosen in enumerate(routing.chosen.tolist()):
            assert set(found.routed[layer, position][0]) == set(chosen)


def load_weights(directory: Path, text: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors by the names of `tests.builtin.shape`, read without the program."""
    prefix = "language_model."
    tensors = {n.removeprefix(prefix): x for n, x in read_tensors(directory).items()}
    weights = {
        name: torch.from_numpy(x).float() for name, x in tensors.items() if ".experts." not in name
    }
    heads = text["linear_attn_config"]["num_heads"]
    for layer in range(text["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        if f"{name}self_attn.A_log" in weights:
            weights[f"{name}self_attn.A_log"] = weights[f"{name}self_attn.A_log"][:heads]
        if layer < text["first_k_dense_replace"]:
            continue
        name += "block_sparse_moe.experts."
        for which in ("w1", "w2", "w3"):
            stems = [f"{name}{expert}.{which}.weight_" for expert in range(text["num_experts"])]
            found = [mxfp4(tensors[stem + "packed"], tensors[stem + "scale"]) for stem in stems]
            weights[name + which] = torch.from_numpy(np.stack(found)).float()
    return weights
