"""The memory plan: what a budget holds and what each token then reads. Pure: no I/O.

Every byte of size that the engine will hold is an item here; the engine allocates what the plan
says, before the first token, and nothing else. The trunk goes first and is pinned evenly over the
walk, so that the disk has steady work; what is left over becomes expert slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kimi_cli import native
from kimi_cli.buffers import Buffers, model_buffers
from kimi_cli.config import Config
from kimi_cli.errors import BudgetError
from kimi_cli.stream import ALIGN, round_up
from kimi_cli.tensors import expert_bytes
from kimi_cli.trunk import Unit
from kimi_cli.units import MIB, format_size

FLOOR_CHUNK = 4
"""Prompt tokens per pass that even the smallest plan has room for."""
MAX_CHUNK = 256
FLOOR_SLOTS = 6
RING = 64 * MIB
"""Even of the smallest plan. With half the ring and 4 slots a token took 1.17 times what its bytes
do, instead of 1.10: there are fewer reads in flight wherever one is waited for."""
MAX_RING = 256 * MIB
THREAD = 320 << 10
"""Touched stack and bookkeeping of a thread that computes: most are the sums of one block of a
batched product."""
READER = 256 << 10
"""The same of one that reads."""
ROUNDING = 8 * MIB
"""Page tables, allocator slack and partly used pages."""
SIZE_STEP = MIB
SLACK = MIB
"""How much one start of the program may differ from the next."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of the walk that is held or streamed as a whole: a unit's head (`matrix` -1) or a
    row block of its matrix number `matrix`. `size` is its bytes in memory: whole pages of its file.
    """

    unit: int
    matrix: int
    offset: int
    length: int

    @property
    def size(self) -> int:
        return round_up(self.offset % ALIGN + self.length)


@dataclass(frozen=True)
class Request:
    """What a run asks for. `context` counts positions; `prompt` tokens are prefilled."""

    context: int
    prompt: int
    threads: int
    readers: int
    chunk: int | None = None
    all_logits: bool = False


@dataclass(frozen=True)
class Plan:
    """Named items in bytes, and what they mean for the engine and the disk."""

    budget: int
    floor: int
    context: int
    threads: int
    readers: int
    chunk: int
    items: dict[str, int]
    pinned: frozenset[int]
    pinned_bytes: int
    ring: int
    slots: int
    slot_bytes: int
    buffers: Buffers
    trunk_per_token: int
    expert_per_token: int

    @property
    def total(self) -> int:
        return sum(self.items.values())


def walk(units: Sequence[Unit]) -> list[Segment]:
    """The trunk in the order in which one token consumes it. A segment is known by its place."""
    segments = []
    for u, unit in enumerate(units):
        segments.append(Segment(u, -1, unit.head_offset, unit.head_length))
        for m, matrix in enumerate(unit.matrices):
            for rows in matrix.blocks:
                segments.append(Segment(u, m, rows.block.offset, rows.block.length))
    return segments


def spread(segments: Sequence[Segment], room: int) -> tuple[frozenset[int], int]:
    """Places of the row blocks to hold in `room` bytes, spread evenly over the walk; their bytes.

    Heads are streamed with the rest: they are small, and widened where they are used.
    """
    total = sum(s.size for s in segments if s.matrix >= 0)
    chosen, held, passed = set(), 0, 0
    for place, segment in enumerate(segments):
        if segment.matrix < 0:
            continue
        passed += segment.size
        if held + segment.size <= min(passed * room // total, room):
            chosen.add(place)
            held += segment.size
    return frozenset(chosen), held


def latent_bytes(config: Config, context: int) -> int:
    """Bytes of the latent cache: normed latent and rope key per position and MLA layer."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return len(config.mla_layers) * context * width * 4


def kda_bytes(config: Config) -> tuple[int, int]:
    """Bytes of the KDA matrices and of the convolution histories."""
    layers = config.num_hidden_layers - len(config.mla_layers)
    width = config.kda_num_heads * config.kda_head_dim
    histories = 3 * (config.conv_size - 1) * width * 4
    return layers * width * config.kda_head_dim * 4, layers * histories


def head_rows(config: Config) -> int:
    """Rows of kv_b_proj that belong to one head."""
    return config.qk_nope_head_dim + config.v_head_dim


def block_heads(config: Config, units: Sequence[Unit]) -> int:
    """The most heads that one piece of kv_b_proj holds."""
    rows = [
        max((b.rows for b in matrix.blocks), default=matrix.rows)
        for unit in units
        for matrix in unit.matrices
        if matrix.name.endswith(".kv_b_proj.weight")
    ]
    return max(rows, default=head_rows(config)) // head_rows(config)


def _buffers(config: Config, units: Sequence[Unit], request: Request, chunk: int) -> Buffers:
    heads = block_heads(config, units)
    cols = round_up(max(m.cols for u in units for m in u.matrices), 128)
    latent, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    expert = round_up(latent, 128) + round_up(inter, 128)
    scratch = max(cols, expert, heads * round_up(config.kv_lora_rank, 128)) * chunk
    width = config.kv_lora_rank + config.qk_rope_head_dim
    attend = native.mla_scratch_floats(request.context, heads, width)
    logits = chunk if request.all_logits else 1
    return model_buffers(config, chunk, logits, heads, scratch, attend)


def routed_experts(config: Config) -> int:
    """Routed experts of all layers."""
    return config.num_experts * (config.num_hidden_layers - config.first_k_dense_replace)


def expert_reads(config: Config, slots: int) -> int:
    """Bytes of experts that a token reads once `slots` of them are warm, their use being flat.

    Least-recently-used slots hold nothing for the next token until they hold all that one token
    asks for; from there on any expert is as likely to be held as any other.
    """
    experts = routed_experts(config)
    asked = experts * config.num_experts_per_token // config.num_experts
    held = slots if slots >= asked else 0
    return asked * expert_bytes(config) * (experts - held) // max(experts, 1)


SLOT_OBJECTS = 2048
"""Python bytes that the expert in a slot costs."""


def slot_size(config: Config, contiguous: bool) -> int:
    """Bytes of one expert slot: its extent in aligned reads, or six of them."""
    pieces = 1 if contiguous else 6
    return round_up(expert_bytes(config)) + 2 * ALIGN * pieces


def make_plan(
    config: Config,
    units: Sequence[Unit],
    request: Request,
    budget: int,
    base: dict[str, int],
    contiguous: bool = True,
) -> Plan:
    """The plan for `budget` bytes. Raises BudgetError when even the smallest plan exceeds it.

    `base` holds what the process has before the engine starts: interpreter, tokenizer.
    """
    segments = walk(units)
    floor = smallest_plan(config, units, request, base, contiguous, segments)
    if floor.total > budget:
        raise BudgetError(_shortfall(config, units, request, budget, base, contiguous, floor))
    return grow(config, units, request, replace(floor, budget=budget), segments)


def smallest_plan(
    config: Config,
    units: Sequence[Unit],
    request: Request,
    base: dict[str, int],
    contiguous: bool = True,
    segments: Sequence[Segment] | None = None,
) -> Plan:
    """The plan that needs the least memory; its budget is 0, its floor what it needs.

    `segments` is the walk over `units`, where it is known already.
    """
    segments = segments or walk(units)
    sizes = [segment.size for segment in segments]
    total, largest = sum(sizes), max(sizes)
    chunk = _floor_chunk(request)
    routed = config.num_hidden_layers > config.first_k_dense_replace
    slots = min(FLOOR_SLOTS, routed_experts(config)) if routed else 0
    plan = Plan(
        budget=0,
        floor=0,
        context=request.context,
        threads=request.threads,
        readers=request.readers,
        chunk=chunk,
        items={},
        pinned=frozenset(),
        pinned_bytes=0,
        ring=min(max(2 * largest, RING), total),
        slots=slots,
        slot_bytes=slot_size(config, contiguous),
        buffers=_buffers(config, units, request, chunk),
        trunk_per_token=sum(s.length for s in segments),
        expert_per_token=expert_reads(config, slots),
    )
    plan = _assemble(config, request, plan, base, _side(units))
    return replace(plan, floor=plan.total)


def _assemble(
    config: Config, request: Request, plan: Plan, base: dict[str, int], side: int
) -> Plan:
    kda, histories = kda_bytes(config)
    items = {
        **base,
        "kda_state": kda,
        "conv_histories": histories,
        "latent_cache": latent_bytes(config, request.context),
        "activations": plan.buffers.size,
        "layer_vectors": side,
        "ring": plan.ring,
        "expert_slots": plan.slots * (plan.slot_bytes + SLOT_OBJECTS),
        "pinned_trunk": plan.pinned_bytes,
        "threads": request.threads * THREAD + request.readers * READER,
        "rounding": ROUNDING,
    }
    return replace(plan, items=items)


def _floor_chunk(request: Request) -> int:
    return min(request.prompt, request.chunk or FLOOR_CHUNK)


def _side(units: Sequence[Unit]) -> int:
    """Bytes where the small tensors of the layer in hand are kept, raw and widened."""
    return max(round_up(u.head_length) + round_up(u.widened_floats * 4) for u in units)


def grow(
    config: Config,
    units: Sequence[Unit],
    request: Request,
    floor: Plan,
    segments: Sequence[Segment],
) -> Plan:
    """Spends what the budget has beyond the floor: longer chunks, deeper reading, pinned trunk,
    then expert slots. `floor` is the smallest plan, with the budget filled in."""
    base = {name: floor.items[name] for name in floor.items if name in BASE_ITEMS}
    spare = floor.budget - floor.total
    chunk = floor.chunk
    if request.chunk is None:
        while chunk < min(request.prompt, MAX_CHUNK):
            longer = min(chunk * 2, request.prompt, MAX_CHUNK)
            cost = _buffers(config, units, request, longer).size - floor.buffers.size
            if cost > spare // 8:
                break
            chunk = longer
    buffers = _buffers(config, units, request, chunk)
    spare -= buffers.size - floor.buffers.size
    total = sum(s.size for s in segments)
    widened = sum(round_up(u.widened_floats * 4) for u in units)
    experts = routed_experts(config)
    side, ring, slots = _side(units), floor.ring, floor.slots
    slot = floor.slot_bytes + SLOT_OBJECTS
    if total + widened <= spare + ring + side:
        pinned, held = frozenset(range(len(segments))), total + widened
        spare += ring + side - held
        ring = side = 0
        slots = min(experts, slots + spare // slot)
    else:
        more = min(max(spare // 16 - ring, 0) // ALIGN * ALIGN, MAX_RING - ring, total - ring)
        ring += max(more, 0)
        spare -= max(more, 0)
        more = min(experts, config.num_experts_per_token) - slots
        more = max(min(more, spare // 16 // slot), 0)
        slots += more
        spare -= more * slot
        pinned, held = spread(segments, spare)
    streamed = sum(s.length for place, s in enumerate(segments) if place not in pinned)
    plan = replace(
        floor,
        chunk=chunk,
        buffers=buffers,
        pinned=pinned,
        pinned_bytes=held,
        ring=ring,
        slots=slots,
        trunk_per_token=streamed,
        expert_per_token=expert_reads(config, slots),
    )
    return _assemble(config, request, plan, base, side)


BASE_ITEMS = ("interpreter", "tokenizer", "manifest")


def _shortfall(
    config: Config,
    units: Sequence[Unit],
    request: Request,
    budget: int,
    base: dict[str, int],
    contiguous: bool,
    floor: Plan,
) -> str:
    need = round_up(floor.total + SLACK, SIZE_STEP)
    text = (
        f"a context of {request.context} tokens needs at least {need // MIB} MiB, "
        f"{format_size(need - budget)} more than --ram {format_size(budget)}"
    )
    longest = longest_context(config, units, request, budget - SLACK, base, contiguous)
    fix = f"use --ram {need // MIB}M or more"
    if longest:
        fix += f", or --context {longest} or less"
    return f"{text}: {fix}"


def longest_context(
    config: Config,
    units: Sequence[Unit],
    request: Request,
    budget: int,
    base: dict[str, int],
    contiguous: bool = True,
) -> int:
    """The longest context, in tokens, whose smallest plan fits `budget`; 0 if none does."""
    floor = smallest_plan(config, units, request, base, contiguous)
    room = budget - floor.total + floor.items["latent_cache"] + floor.items["activations"]

    def fits(context: int) -> bool:
        asked = replace(request, context=context, prompt=min(request.prompt, context))
        buffers = _buffers(config, units, asked, _floor_chunk(asked))
        return latent_bytes(config, context) + buffers.size <= room

    low, high = 0, config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def trunk_bytes(units: Iterable[Unit]) -> int:
    """Bytes of the trunk's files."""
    return sum(unit.size for unit in units)
