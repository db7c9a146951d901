"""How long a token takes, from measured rates and a memory plan. Pure arithmetic: no I/O.

Within a layer the router must run before anybody knows which experts to read; while they are read,
the shared experts are multiplied. Everything else streams ahead of its use:

    disk   | next layers' trunk ....... | this layer's experts ... | trunk ..
    cores  | attention, router ........ | shared experts, experts  | attention ..

Only products of weights are counted: the rest is a few percent of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_cli.config import Config
from kimi_cli.plan import Plan
from kimi_cli.tensors import LM_HEAD, expert_bytes
from kimi_cli.trunk import Unit

PROMPT = 1000
"""Prompt tokens whose prefill time is foretold."""
_BESIDE = ("shared_experts.", "routed_expert_down_proj.")


@dataclass(frozen=True)
class Kernel:
    """Seconds that a product takes per weight: for one column, and for each further column."""

    first: float
    further: float

    def seconds(self, weights: float, columns: float) -> float:
        """Seconds of a product of `weights` weights with `columns` columns."""
        return weights * (self.first + self.further * (columns - 1))


@dataclass(frozen=True)
class Rates:
    """What was measured: bytes per second of trunk blocks and of expert extents; the products."""

    blocks: float
    extents: float
    trunk: Kernel
    expert: Kernel


@dataclass(frozen=True)
class Work:
    """What a model asks for. Weights of the trunk's layers (`beside` of them while experts are
    read) and of lm_head; of one expert, weights and bytes; `chosen` of `experts` in each of
    `layers`. `head_share` of the trunk's bytes are lm_head's."""

    trunk: int
    beside: int
    head: int
    head_share: float
    expert: int
    expert_bytes: int
    chosen: int
    experts: int
    layers: int


@dataclass(frozen=True)
class Prediction:
    """Seconds per generated token and per PROMPT prompt tokens, and what limits each: "disk" or
    "compute"."""

    token_seconds: float
    token_limit: str
    prefill_seconds: float
    prefill_limit: str


def work_of(config: Config, units: Sequence[Unit]) -> Work:
    """The work of one model; `units` are its trunk's."""
    matrices = [matrix for unit in units for matrix in unit.matrices]
    weights = {matrix.name: matrix.rows * matrix.cols for matrix in matrices}
    head = weights.pop(LM_HEAD)
    beside = sum(n for name, n in weights.items() if any(part in name for part in _BESIDE))
    return Work(
        trunk=sum(weights.values()),
        beside=beside,
        head=head,
        head_share=units[-1].size / sum(unit.size for unit in units),
        expert=3 * config.moe_intermediate_size * config.routed_expert_hidden_size,
        expert_bytes=expert_bytes(config),
        chosen=config.num_experts_per_token,
        experts=config.num_experts,
        layers=config.num_hidden_layers - config.first_k_dense_replace,
    )


def distinct(work: Work, tokens: int) -> float:
    """Expected number of different experts that `tokens` tokens choose in one layer."""
    return work.experts * (1 - (1 - work.chosen / work.experts) ** tokens)


def predict(plan: Plan, work: Work, rates: Rates) -> Prediction:
    """What `plan` will take, its expert slots being warm and the use of experts flat."""
    token, token_limit = _pass(plan, work, rates, 1, True)
    return Prediction(token, token_limit, *predict_prefill(plan, work, rates, PROMPT))


def predict_prefill(plan: Plan, work: Work, rates: Rates, tokens: int) -> tuple[float, str]:
    """Seconds that `tokens` prompt tokens, at least one, take; and what limits them."""
    whole, rest = divmod(tokens, plan.chunk)
    seconds, limit = _pass(plan, work, rates, plan.chunk, False) if whole else (0.0, "")
    seconds *= whole
    if rest:
        last, last_limit = _pass(plan, work, rates, rest, False)
        seconds, limit = seconds + last, limit or last_limit
    return seconds, limit


def _pass(plan: Plan, work: Work, rates: Rates, tokens: int, head: bool) -> tuple[float, str]:
    """Seconds of one pass over the layers, and what limits it."""
    wanted = distinct(work, tokens)
    asked = work.layers * work.chosen * work.expert_bytes
    misses = plan.expert_per_token / asked if asked else 0.0
    trunk_bytes = plan.trunk_per_token * (1.0 if head else 1 - work.head_share)
    trunk_read = trunk_bytes / rates.blocks
    expert_read = work.layers * wanted * work.expert_bytes * misses / rates.extents
    columns = tokens * work.chosen / wanted
    experts = rates.expert.seconds(work.layers * wanted * work.expert, columns)
    beside = rates.trunk.seconds(work.beside, tokens)
    trunk = rates.trunk.seconds(work.trunk, tokens) + rates.trunk.seconds(work.head * head, 1)
    disk, cores = trunk_read + expert_read, trunk + experts
    in_turn = trunk - beside + max(beside + experts, expert_read + experts / wanted)
    return max(disk, in_turn), "disk" if disk >= cores else "compute"
