"""The engine against a float64 model of its own kind, and against itself, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_model import ReferenceModel
from running import Run, forged, make_model, plan_of, run, tighten

from kimi_cli import native
from kimi_cli.builtin import ROOT, TINY
from kimi_cli.config import load_config, parse_config
from kimi_cli.engine import Engine, Source
from kimi_cli.errors import CheckpointError, NumericError, ReadError
from kimi_cli.experts import Experts
from kimi_cli.state import State
from kimi_cli.trunk import Trunk

BOUND = 5e-4
"""On logits of standard deviation 4."""
GOLDEN = {"golden": TINY / "config.json", "golden_block12": ROOT / "config_block12.json"}


def tokens(source: Source, count: int, seed: int = 0) -> list[int]:
    ids = np.random.default_rng(seed).integers(0, source.config.vocab_size, count)
    return [int(i) for i in ids]


def check(found: Run, directory: Path, config: dict[str, Any], ids: list[int]) -> None:
    """Logits and routing of the engine against those of the reference."""
    wanted = ReferenceModel(directory, config).run(ids)
    assert wanted.margin > 1e-5, "choose another seed: rounding may decide the routing"
    scale = max(wanted.logits.std() / 4, 1.0)
    error = np.abs(found.logits - wanted.logits).max()
    assert found.logits.shape == wanted.logits.shape
    assert error <= BOUND * scale, f"largest error {error:.2e}"
    for layer, chosen in wanted.routed.items():
        for t in range(len(ids)):
            experts, weights = found.routed[layer, t]
            assert sorted(experts) == chosen[t].tolist(), (layer, t)
            by_id = [weights[experts.index(expert)] for expert in chosen[t].tolist()]
            assert np.allclose(by_id, wanted.weights[layer][t], rtol=1e-4, atol=1e-6)
    assert len(found.routed) == len(wanted.routed) * len(ids)


# --- the reference itself ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, Any]]:
    found = {}
    for name in GOLDEN:
        with np.load(ROOT / f"{name}.npz") as arrays:
            found[name] = dict(arrays)
    return found


@pytest.mark.parametrize("name", list(GOLDEN))
def test_reference_gives_the_golden_logits(name: str, golden: dict[str, dict[str, Any]]) -> None:
    data, config = golden[name], json.loads(GOLDEN[name].read_text())
    ids = [*data["prompt_ids"].tolist(), *data["gen_ids"].tolist()[:-1]]
    result = ReferenceModel(TINY, config).run(ids)
    wanted = np.concatenate([data["logits"], data["gen_logits"]])
    assert np.abs(result.logits - wanted).max() < 2e-6
    for layer, chosen in result.routed.items():
        assert (chosen == data["routed_ids"][layer]).all()
        assert np.abs(result.weights[layer] - data["routed_w"][layer]).max() < 1e-6
    assert result.margin == pytest.approx(data["route_margin"][1:].min(), abs=1e-7)


# --- golden vectors ------------------------------------------------------------------------------


def golden_source(name: str) -> Source:
    config = parse_config(json.loads(GOLDEN[name].read_text()), name)
    return Source(config, Trunk.open(TINY / "kimi-trunk", TINY, config))


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_vectors(name: str, golden: dict[str, dict[str, Any]]) -> None:
    data, source = golden[name], golden_source(name)
    prompt, ids = data["prompt_ids"].tolist(), data["gen_ids"].tolist()
    found = run(source, prompt, ids[:-1])
    wanted = np.concatenate([data["logits"], data["gen_logits"]])
    assert np.abs(found.logits - wanted).max() <= BOUND
    chosen = [native.argmax(row) for row in found.logits[len(prompt) - 1 :]]
    assert chosen == ids
    for (layer, t), (experts, weights) in found.routed.items():
        assert sorted(experts) == data["routed_ids"][layer][t].tolist()
        by_id = [weight for _, weight in sorted(zip(experts, weights, strict=True))]
        assert np.abs(np.array(by_id) - data["routed_w"][layer][t]).max() < 1e-5


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_bits_are_one(name: str, golden: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """For any instruction set, thread count, chunk, encoding and budget."""
    from kimi_cli.repack import repack

    data, source = golden[name], golden_source(name)
    prompt, ids = data["prompt_ids"].tolist(), data["gen_ids"].tolist()[:3]
    first = run(source, prompt, ids, isa="scalar", chunk=len(prompt))
    plain = repack(TINY, tmp_path / "plain", plain=True)
    other = Source(source.config, Trunk.open(plain, TINY, source.config))
    for isa in native.supported_isas():
        assert run(source, prompt, ids, isa=isa, chunk=13).same(first), isa
        assert run(other, prompt, ids, isa=isa, threads=2).same(first), isa
    for chunk in (1, 7, 64):
        assert run(source, prompt, ids, chunk=chunk).same(first), chunk
    for threads in (2, 5):
        assert run(source, prompt, ids, threads=threads).same(first), threads
    for edit in (tighten(0, 1), tighten(0.3, 2), tighten(1, 12)):
        assert run(source, prompt, ids, chunk=20, edit=edit).same(first)
    assert run(other, prompt, ids, threads=2, edit=tighten(0.8, 5)).same(first)
    assert run(source, prompt, ids, ram=0).same(first)


# --- shapes --------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "hidden 96, 1 MLA head, 3 KDA heads": dict(
        hidden_size=96, num_attention_heads=1, num_heads=3, vocab_size=513
    ),
    "hidden 160, 5 MLA heads, 1 KDA head of 40": dict(
        hidden_size=160, num_attention_heads=5, num_heads=1, head_dim=40, vocab_size=301
    ),
    "hidden 100, 3 MLA heads, 5 KDA heads of 7": dict(
        hidden_size=100, num_attention_heads=3, num_heads=5, head_dim=7, vocab_size=333
    ),
    "conv 1": dict(short_conv_kernel_size=1),
    "conv 2, 1 shared expert": dict(short_conv_kernel_size=2, num_shared_experts=1),
    "conv 3, 3 shared experts, no dense layer": dict(
        short_conv_kernel_size=3, num_shared_experts=3, first_k_dense_replace=0
    ),
    "conv 5, 2 dense layers": dict(short_conv_kernel_size=5, first_k_dense_replace=2),
    "all layers dense": dict(first_k_dense_replace=5),
    "top 1": dict(num_experts=7, num_experts_per_token=1),
    "all experts": dict(num_experts=5, num_experts_per_token=5),
    "one expert": dict(num_experts=1, num_experts_per_token=1),
    "a snapshot a layer": dict(attn_res_block_size=1),
    "a snapshot every second layer": dict(attn_res_block_size=2),
    "one snapshot": dict(attn_res_block_size=100),
    "odd MLA widths": dict(
        qk_rope_head_dim=3, v_head_dim=24, qk_nope_head_dim=17, kv_lora_rank=33, q_lora_rank=41
    ),
    "experts 32 x 160, factor 2.5": dict(
        moe_intermediate_size=32, routed_expert_hidden_size=160, routed_scaling_factor=2.5
    ),
    "experts 96 x 32, decay to -1.5, older layouts": dict(
        moe_intermediate_size=96, routed_expert_hidden_size=32, gate_lower_bound=-1.5,
        a_log_4d=True, conv_2d=True,
    ),
    "dtypes the other way round": dict(
        f32=["*proj.weight", "*norm.weight", "*embed*", "*gate.weight", "*lm_head*"],
        bf16=["*dt_bias", "*conv1d*", "*A_log", "*correction_bias"],
    ),
    "other constants": dict(
        rms_norm_eps=1e-3, activation_situ_beta=1.5, activation_situ_linear_beta=3.0
    ),
    "KDA only": dict(full_attn_layers=[], kda_layers=[1, 2, 3, 4, 5]),
    "MLA only": dict(kda_layers=[], full_attn_layers=[1, 2, 3, 4, 5]),
    "MLA first": dict(full_attn_layers=[1, 2], kda_layers=[3, 4, 5]),
    "one layer": dict(num_hidden_layers=1),
    "scattered tensors": dict(scatter_experts=True, scatter_trunk=True),
    "everything odd": dict(
        hidden_size=72, num_attention_heads=3, num_heads=2, head_dim=20, qk_rope_head_dim=5,
        qk_nope_head_dim=11, v_head_dim=9, kv_lora_rank=21, q_lora_rank=19, vocab_size=257,
        intermediate_size=67, num_experts=9, num_experts_per_token=3, num_shared_experts=3,
        moe_intermediate_size=160, routed_expert_hidden_size=96, attn_res_block_size=3,
        short_conv_kernel_size=3, first_k_dense_replace=2, num_hidden_layers=8,
        routed_scaling_factor=0.7, gate_lower_bound=-8.0, scatter_experts=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_against_the_reference(name: str, tmp_path: Path) -> None:
    options = {"num_hidden_layers": 5, **SHAPES[name]}
    source = make_model(tmp_path, 3, shards=min(2, options["num_hidden_layers"]), **options)
    ids = tokens(source, 21)
    prompt, feed = ids[:17], ids[17:]
    first = run(source, prompt, feed)
    config = json.loads((tmp_path / "config.json").read_text())
    check(first, tmp_path, config, ids)
    slots = None if "dense" in name and "all" in name else 1
    for chunk, threads, edit in ((1, 2, tighten(0.4, slots)), (5, 1, tighten(0, slots))):
        again = run(source, prompt, feed, chunk=chunk, threads=threads, edit=edit, isa="scalar")
        assert again.same(first)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("small")
    return make_model(directory, 4, num_hidden_layers=4, hidden_size=96, num_experts=6)


def test_long_prompt_against_the_reference(small: Source) -> None:
    ids = tokens(small, 90, seed=2)
    directory = small.trunk.shards[0].parent
    config = json.loads((directory / "config.json").read_text())
    check(run(small, ids[:70], ids[70:]), directory, config, ids)


def test_prompts_of_1_to_70_tokens(small: Source) -> None:
    """The last logits of each are those of the whole, however it is cut; then it goes on."""
    ids = tokens(small, 72, seed=2)
    whole = run(small, ids, chunk=72)
    for length in range(1, 71):
        chunk = (1, 2, 3, 5, 8, 16, 31, 64, 70)[length % 9]
        found = run(small, ids[:length], ids[length : length + 2], chunk=chunk, all_logits=False)
        rows = whole.logits[length - 1 : length + 2]
        assert len(found.logits) == 3
        assert np.array_equal(found.logits.view(np.uint32), rows.view(np.uint32)), (length, chunk)
        assert all(whole.routed[key] == value for key, value in found.routed.items())


def test_chunks_of_every_length(small: Source) -> None:
    ids = tokens(small, 33, seed=5)
    whole = run(small, ids, chunk=33)
    for chunk in (*range(1, 12), 16, 17, 31, 32):
        assert run(small, ids, chunk=chunk, threads=1 + chunk % 3).same(whole), chunk


def test_context_longer_than_the_run_changes_nothing(small: Source) -> None:
    ids = tokens(small, 9)
    first = run(small, ids)
    assert run(small, ids, context=5000).same(first)
    assert run(small, ids, context=5000, ram=0, threads=2).same(first)


def test_operations_are_repeated_on_their_own_state_only(small: Source) -> None:
    ids = tokens(small, 12, seed=7)
    with Engine(small, plan_of(small, ram=None, context=12)) as engine:
        engine.load()
        first = [engine.step(token, True).copy() for token in ids]
        kept = [calls for calls in engine.model._kept.values() if calls is not None]
        assert len(kept) == len(engine.model._kept) >= 4 * small.config.num_hidden_layers
        engine.reset()
        again = [engine.step(token, True).copy() for token in ids[:6]]
        other = State(small.config, 12)
        for token, wanted in zip(ids, first, strict=True):
            logits = engine.model.forward(other, [token], "last", "last")
            assert logits is not None and np.array_equal(logits, wanted)
        again += [engine.step(token, True).copy() for token in ids[6:]]
    assert all(map(np.array_equal, first, again))
    assert np.array_equal(np.concatenate(first), run(small, ids, ram=0).logits)


def test_nothing_in_pieces_is_repeated(tmp_path: Path) -> None:
    source = make_model(tmp_path, 3, num_hidden_layers=3, hidden_size=512)
    plan = tighten(0.5)(plan_of(source, ram=None, context=12), source)
    with Engine(source, plan) as engine:
        engine.load()
        for token in tokens(source, 3):
            engine.step(token, True)
        kept = {key: calls is not None for key, calls in engine.model._kept.items()}
    assert set(kept.values()) == {False, True}
    assert all(kept[n, "before mlp"] for n in range(source.config.num_hidden_layers))


# --- failures ------------------------------------------------------------------------------------


def test_trunk_bytes_of_each_decode_step_are_the_plans(small: Source) -> None:
    floor = plan_of(small, ram=0, chunk=4)
    for plan in (tighten(share)(floor, small) for share in (0, 0.3, 1)):
        with Engine(small, plan) as engine:
            engine.load()
            for _ in engine.prefill(tokens(small, 9), False, True):
                pass
            for _ in range(3):
                before = engine.weights.bytes_read
                engine.step(5, True)
                assert engine.weights.bytes_read - before == plan.trunk_per_token
                assert engine.state.position > 9


def test_embedding_row_that_is_damaged(small: Source, tmp_path: Path) -> None:
    place = small.trunk.embedding
    offset = place.offset + 2 * 96 * 7
    copy, token = _with_bytes(small, tmp_path, place.shard, offset, b"\x80\x7f")
    said = rf"the embedding of token 7, 192 bytes at offset {offset}, has checksum [0-9a-f]{{8}}"
    with pytest.raises(ReadError, match=said):
        run(copy, [7])
    assert len(run(copy, [6, 8]).logits) == 2 and token


def test_logits_that_are_not_finite_end_the_run(
    small: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = native.expert_sum

    def spoiled(x: Any, weights: Any, y: Any) -> None:
        real(x, weights, y)
        y[0, 3] = np.nan

    monkeypatch.setattr(native, "expert_sum", spoiled)
    with pytest.raises(NumericError, match="NaN or infinity"):
        run(small, [1, 2])


NAN16, NAN32, INF32 = b"\xc0\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff"
LAYER = "language_model.model.layers.1."


@pytest.mark.parametrize(
    ("name", "bits", "element"),
    [
        (LAYER + "block_sparse_moe.gate.e_score_correction_bias", NAN32, 5),
        (LAYER + "self_attn.A_log", NAN32, 1),
        (LAYER + "self_attn.dt_bias", INF32, 7),
        (LAYER + "input_layernorm.weight", NAN16, 3),
        ("language_model.model.norm.weight", NAN16, 0),
    ],
)
@pytest.mark.parametrize("ram", [0, None], ids=["streamed", "pinned"])
def test_small_tensors_that_are_no_numbers_are_named(
    small: Source, tmp_path: Path, name: str, bits: bytes, element: int, ram: int | None
) -> None:
    """An expert whose bias is NaN would never be chosen, and nothing else would tell."""
    source = forged(small, tmp_path, name, bits, element)
    said = rf"/kimi-trunk/.*: {name} has NaN or infinity at element {element}, offset [0-9]+: the t"
    with pytest.raises(CheckpointError, match=said):
        run(source, [1, 2], ram=ram)


def test_a_router_that_gives_no_numbers_ends_the_run(small: Source, tmp_path: Path) -> None:
    source = forged(small, tmp_path, LAYER + "block_sparse_moe.gate.weight", NAN16, 9)
    with pytest.raises(NumericError, match=r"^the router of layer 1 gives NaN or infinity"):
        run(source, [1, 2])


def test_escapes_out_of_order_are_named(tmp_path: Path) -> None:
    packed = make_model(tmp_path / "packed", 3, hidden_size=128, num_hidden_layers=2)
    for name in ("mlp.gate_proj", "self_attn.q_proj"):
        full = f"language_model.model.layers.0.{name}.weight"
        source = forged(packed, tmp_path / name, f"{full}.escapes", b"\xff\xff\xff\xff")
        said = rf"/kimi-trunk/layer-000\.safetensors: {full}: packed weights have escapes out of or"
        with pytest.raises(CheckpointError, match=said):
            run(source, [1, 2])


def test_engine_that_cannot_be_made_leaves_nothing_behind(
    small: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    from dataclasses import replace

    from running import all_ended, plan_of, tasks

    gone = [tmp_path / "gone" for _ in small.trunk.shards]
    broken = Source(small.config, replace(small.trunk, shards=tuple(gone)))
    files, before = len(os.listdir("/proc/self/fd")), tasks()
    with pytest.raises(ReadError, match="gone: cannot be opened"):
        Engine(broken, plan_of(small))
    assert len(os.listdir("/proc/self/fd")) == files and all_ended(before)
    with Engine(small, plan_of(small)):
        assert tasks() - before
    assert len(os.listdir("/proc/self/fd")) == files and all_ended(before)


def test_expert_that_never_arrives_is_no_zero(
    small: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged expert ends the pass at once, with no logits."""

    def fail(self: Experts, layer: int, expert: int, slot: int) -> None:
        raise ReadError(f"expert {expert} of layer {layer} is damaged")

    monkeypatch.setattr(Experts, "_check", fail)
    with pytest.raises(ReadError, match="is damaged"):
        run(small, [1, 2, 3])


def _with_bytes(
    source: Source, directory: Path, shard: int, offset: int, data: bytes
) -> tuple[Source, bool]:
    from dataclasses import replace

    path = directory / source.trunk.shards[shard].name
    path.write_bytes(source.trunk.shards[shard].read_bytes())
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    shards = list(source.trunk.shards)
    shards[shard] = path
    return Source(source.config, replace(source.trunk, shards=tuple(shards))), True


def test_config_of_the_builtin_checkpoint() -> None:
    assert load_config(TINY).num_hidden_layers == 13
