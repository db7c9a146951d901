"""The model card: `card.md` filled with a run's dimensions and what `evaluate` reported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.builtin.quantise import is_expert

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def fill(
    config: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    report: Mapping[str, Any],
    batch: int,
) -> str:
    """The card's text."""
    text = config["text_config"]
    linear = text["linear_attn_config"]
    sizes = {name: p.numel() for name, p in parameters.items()}
    routed = sum(size for name, size in sizes.items() if is_expert(name))
    rest = sum(size for name, size in sizes.items() if not is_expert(name) and name not in TABLES)
    counts = report["routing"]
    rows = []
    for layer, load in enumerate(counts, text["first_k_dense_replace"]):
        least, most = (100 * pick(load) / sum(load) for pick in (min, max))
        rows.append(f"| {layer} | {least:.1f} | {most:.1f} |")
    values = {
        **{key: report[key] for key in ("steps", "minutes", "held", "bigram", "trigram")},
        "parameters": _millions(sum(sizes.values())),
        "expert_parameters": _millions(routed),
        "active": _millions(rest + routed * text["num_experts_per_token"] // text["num_experts"]),
        "layers": text["num_hidden_layers"],
        "kda": len(linear["kda_layers"]),
        "mla": len(linear["full_attn_layers"]),
        "block": text["attn_res_block_size"],
        "experts": text["num_experts"],
        "chosen": text["num_experts_per_token"],
        "shared": text["num_shared_experts"],
        "hidden": text["hidden_size"],
        "latent": text["routed_expert_hidden_size"],
        "ranks": f"{text['vocab_size'] - 256:,}",
        "batch": batch,
        "held_tokens": f"{report['held_tokens']:,}",
        "unused": sum(load.count(0) for load in counts),
        "even": 100 / text["num_experts"],
        "routing": "\n".join(rows),
    }
    return (Path(__file__).with_name("card.md")).read_text("utf-8").format(**values)


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} M"
