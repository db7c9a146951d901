"""The command line: options to calls. It computes nothing, and imports what a command needs only
when that command runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kimi_cli import console

if TYPE_CHECKING:
    from kimi_cli.answer import Settings
    from kimi_cli.sampler import Sampling

Command = TypeVar("Command", bound=Callable[..., Any])

ISAS = ["auto", "scalar", "avx2", "avx512", "neon"]
PARTS = ["kernels", "disk", "stream", "decode", "prefill"]
PROGRESS = ["auto", "json", "none"]
THINKING = ["off", "low", "medium", "high", "max"]


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes of a memory size; 0 for auto."""
    from kimi_cli.units import parse_size

    if value is None:
        return None
    return 0 if value == "auto" else parse_size(value)


def _preset(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes of a preset."""
    from kimi_cli.presets import preset_budget

    return None if value is None else preset_budget(value)


FOLDER = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)


def model_options(command: Command) -> Command:
    """Where the checkpoint and its trunk are."""
    model = click.option(
        "-m", "--model", type=FOLDER, envvar="KIMI_MODEL", help="Checkpoint directory."
    )
    trunk = click.option(
        "--trunk", type=FOLDER, envvar="KIMI_TRUNK", help="Trunk directory [MODEL/kimi-trunk]."
    )
    return model(trunk(command))


def budget_options(command: Command) -> Command:
    """What a plan depends on, besides the model and the context."""
    options = [
        click.option("--ram", callback=_size, help="Memory limit: 8G, 512M, auto [auto]."),
        click.option("--preset", callback=_preset, help="A limit by name, see kimi presets."),
        click.option("--threads", type=click.IntRange(1), help="Threads [all processors]."),
        click.option("--prefill-chunk", type=click.IntRange(1), help="Prompt tokens per pass."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


ISA = click.option("--isa", type=click.Choice(ISAS), default="auto", help="Instruction set.")


def engine_options(command: Command) -> Command:
    """What the engine may use."""
    options = [
        budget_options,
        ISA,
        click.option("--context", type=click.IntRange(1), help="Positions [prompt and answer]."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    """How a token is chosen."""
    options = [
        click.option("--temperature", type=float, default=0.0, help="0 is greedy [0]."),
        click.option("--top-p", type=float, default=1.0, help="Draw from this share [1, all]."),
        click.option("--top-k", type=int, default=0, help="Draw from the K likeliest [0, all]."),
        click.option("--min-p", type=float, default=0.0, help="Least share of the largest [0]."),
        click.option("--seed", type=int, help="Seed of the draws [a new one, reported]."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


CONTEXT = click.option("--context", type=click.IntRange(1), help="Positions [1024].")
JSON = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")


class Commands(click.Group):
    """The commands, out of which an interruption comes without a trace on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise console.Stopped from stop


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kimi-k3-cpu", prog_name="kimi")
def cli() -> None:
    """Run Kimi K3 on this CPU, exactly, in as little memory as you allow.

    Example: kimi generate "Why is the sky blue?" -m ~/Kimi-K3 --ram 8G
    """


@cli.command()
@click.option("-m", "--model", type=FOLDER, envvar="KIMI_MODEL", required=True)
@click.option("--out", type=FOLDER, help="Where to write the trunk [MODEL/kimi-trunk].")
@click.option("--plain", is_flag=True, help="Keep bf16 as it is, do not pack to 12 bits.")
@click.option("--quiet", is_flag=True, help="Errors only.")
def repack(model: Path, out: Path | None, plain: bool, quiet: bool) -> None:
    """Write the trunk: once per checkpoint, resumable.

    Example: kimi repack -m ~/Kimi-K3
    """
    from kimi_cli.progress import Progress
    from kimi_cli.repack import repack as run

    with Progress("repack", "B", quiet) as report:
        directory = run(model, out, plain=plain, report=report)
    if not quiet:
        console.note(f"trunk: {directory}")


@cli.command()
@click.argument("prompt", required=False)
@model_options
@engine_options
@click.option("--raw", is_flag=True, help="Continue the text as it stands, no chat format.")
@click.option("--ids", help="Token ids instead of text: 1,2,3.")
@click.option("--prompt-file", type=FILE, help="Read the prompt from a file; - is stdin.")
@click.option("--messages", type=FILE, help="A conversation, OpenAI style, as JSON.")
@click.option("--system", help="A system message before the prompt.")
@click.option("--thinking", type=click.Choice(THINKING), help="Effort of thinking [off].")
@click.option("-n", "--max-tokens", type=click.IntRange(0), default=128, help="[128]")
@sampling_options
@click.option("--stop", multiple=True, help="End before this text; can be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Do not stop at an end token.")
@click.option("--logits", type=FILE, help="Write the logits of generated tokens (.npy).")
@click.option("--all-logits", type=FILE, help="Write the logits of the prompt (.npy).")
@click.option("--logprobs", type=click.IntRange(0, 20), help="Add K alternatives to the JSON.")
@click.option("--trace", type=FILE, help="Write the routed experts, for kimi replay.")
@click.option("--trace-time", type=FILE, help="Write what ran when, for Perfetto (JSON).")
@click.option("--session", type=FILE, help="Keep the conversation in FILE, and go on with it.")
@click.option(
    "--save-every", type=click.IntRange(1), help="Tokens between two saved states [auto]."
)
@click.option("--prompts", type=FILE, help="Answer every line of FILE, each a prompt as JSON.")
@click.option("--out", type=FILE, help="Add the answers to --prompts to FILE, a line each.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option(
    "--progress",
    type=click.Choice(PROGRESS),
    default="auto",
    help="Shape of progress on stderr [auto].",
)
@click.option("--quiet", is_flag=True, help="Errors only on stderr.")
def generate(**options: Any) -> None:
    """Answer PROMPT, or continue it with --raw.

    Example: kimi generate "Why is the sky blue?" -n 20

    A line of --prompts is an object with prompt, messages (perhaps tools) or ids; and, in place of
    the options, system, thinking, raw, max_tokens, temperature, top_p, top_k, min_p, seed, stop,
    ignore_eos; and id. The same command again goes on where it was stopped.
    """
    from kimi_cli.answer import Wanted, answer
    from kimi_cli.prompt import Given

    sampling = _sampling(options)
    if options["prompts"] is not None or options["out"] is not None:
        _generate_all(options, sampling)
        return
    given = Given(
        text=options["prompt"],
        ids=options["ids"],
        file=options["prompt_file"],
        messages=options["messages"],
        raw=options["raw"],
        system=options["system"],
        thinking=options["thinking"],
    )
    wanted = Wanted(
        max_tokens=options["max_tokens"],
        sampling=sampling,
        stop=options["stop"],
        ignore_eos=options["ignore_eos"],
        logprobs=options["logprobs"],
        logits=options["logits"],
        all_logits=options["all_logits"],
        trace=options["trace"],
        trace_time=options["trace_time"],
        session=options["session"],
        save_every=options["save_every"],
        as_json=options["as_json"],
        quiet=options["quiet"],
        progress=options["progress"],
    )
    answer(_settings(options), given, wanted)


@cli.command()
@model_options
@budget_options
@ISA
@click.option("--context", type=click.IntRange(1), help="Positions of a conversation [8192].")
@click.option("--system", help="A system message before the conversation.")
@click.option("--thinking", type=click.Choice(THINKING), help="Effort of thinking [off].")
@sampling_options
@click.option("-n", "--max-tokens", type=click.IntRange(1), help="Of an answer [all that fits].")
@click.option("--session", type=FILE, help="Keep the conversation in FILE, and go on with it.")
@click.option("--quiet", is_flag=True, help="Errors only on stderr.")
def chat(**options: Any) -> None:
    """Talk with the model; /help lists what else can be typed.

    Example: kimi chat -n 20
    """
    from kimi_cli.dialog import Wanted
    from kimi_cli.dialog import chat as run
    from kimi_cli.talk import Terms

    wanted = Wanted(
        terms=Terms(options["system"], options["thinking"]),
        sampling=_sampling(options),
        max_tokens=options["max_tokens"],
        session=options["session"],
        quiet=options["quiet"],
    )
    run(_settings(options), wanted)


@cli.command()
@click.argument("text", required=False)
@model_options
@engine_options
@click.option("--ids", help="Token ids instead of text: 1,2,3.")
@click.option("--prompt-file", type=FILE, help="Read the text from a file; - is stdin.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a line.")
@click.option("--quiet", is_flag=True, help="Errors only on stderr.")
def score(
    text: str | None,
    ids: str | None,
    prompt_file: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Tell how probable a text is, token by token.

    Example: kimi score "The sky is blue."
    """
    from kimi_cli.score import score as run

    run(_settings(options), text, ids, prompt_file, as_json, quiet)


@cli.command()
@click.argument("file", type=FILE)
@JSON
def session(file: Path, as_json: bool) -> None:
    """Show what a session holds, and check it.

    Example: kimi session chat.session
    """
    from kimi_cli.contents import show_session

    show_session(file, as_json)


@cli.command()
@model_options
@budget_options
@CONTEXT
@JSON
def plan(as_json: bool, **options: Any) -> None:
    """Show what a budget holds in memory and what each token then reads.

    Example: kimi plan --ram 8G
    """
    from kimi_cli.planning import show_plan

    show_plan(_settings(options), as_json)


@cli.command()
@model_options
@CONTEXT
@JSON
def presets(as_json: bool, **options: Any) -> None:
    """List the budgets that have a name, with what each holds and reads.

    Example: kimi presets
    """
    from kimi_cli.planning import show_presets

    show_presets(_settings(options), as_json)


@cli.command()
@click.argument("directory", type=FOLDER, required=False)
@model_options
@CONTEXT
@JSON
def doctor(directory: Path | None, as_json: bool, **options: Any) -> None:
    """Measure this machine and foretell its speed; DIRECTORY is where the model would lie.

    Example: kimi doctor .
    """
    from kimi_cli.doctor import doctor as run

    run(_settings(options), directory, as_json)


@cli.command()
@model_options
@click.option("--deep", is_flag=True, help="Read every expert too, and keep their checksums.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a list.")
def verify(model: Path | None, trunk: Path | None, deep: bool, as_json: bool) -> None:
    """Check every file of a checkpoint and its trunk, and say what to do about each bad one.

    Example: kimi verify -m ~/Kimi-K3
    """
    from kimi_cli.verify import verify as run

    run(model, trunk, deep=deep, as_json=as_json)


@cli.command()
@click.argument("trace", type=FILE)
@click.option("--slots", default="4,16,92,368,1472", help="Expert slots to try, with commas.")
def replay(trace: Path, slots: str) -> None:
    """Replay a routing trace against every expert-cache policy.

    Example: kimi generate "Hi" -n 4 --trace trace.jsonl; kimi replay trace.jsonl --slots 4,48
    """
    from kimi_cli.replay import show

    show(trace, slots)


@cli.command()
@click.argument("parts", nargs=-1, metavar="[PART]...", type=click.Choice(PARTS))
@model_options
@click.option("--ram", callback=_size, help="Largest budget: 8G, 512M, auto [auto].")
@click.option("--threads", type=click.IntRange(1), help="Threads [all processors].")
@click.option("--isa", type=click.Choice(ISAS), default="auto", help="Instruction set.")
@click.option(
    "--slice",
    "slice_",
    type=click.Choice(["full", "small"]),
    default="full",
    help="The model made where none is given; small is a quick look.",
)
@click.option("--work-dir", type=FOLDER, help="Where it is made [the temporary directory].")
@click.option("--json", "as_json", type=FILE, help="Write all figures (JSON).")
@click.option("--plot", type=FILE, help="Draw what decode measures (PNG; needs matplotlib).")
@click.option("--trace-time", type=FILE, help="Write what ran when in stream, for Perfetto.")
def bench(parts: tuple[str, ...], **options: Any) -> None:
    """Measure PARTs against the limits of this machine: kernels, disk, stream, decode, prefill.

    Example: kimi bench kernels
    """
    from kimi_cli.bench.command import Wanted
    from kimi_cli.bench.command import bench as run

    wanted = Wanted(
        parts=parts,
        slice=options["slice_"],
        json=options["as_json"],
        plot=options["plot"],
        trace_time=options["trace_time"],
        work_dir=options["work_dir"],
    )
    run(_settings({**options, "context": None}), wanted)


@cli.command()
@click.option("--isa", type=click.Choice(ISAS), help="Only this instruction set.")
def selftest(isa: str | None) -> None:
    """Check the installed program against golden vectors, on this CPU.

    Example: kimi selftest
    """
    from kimi_cli.selftest import selftest as run

    run(isa)


def _generate_all(options: dict[str, Any], sampling: Sampling) -> None:
    """`generate --prompts`. Raises UsageError for what belongs to one prompt."""
    from kimi_cli.batch import batch
    from kimi_cli.errors import UsageError
    from kimi_cli.query import Manner

    if options["prompts"] is None or options["out"] is None:
        raise UsageError("--prompts and --out go together: give both")
    single = ["prompt", "ids", "prompt_file", "messages", "logits", "all_logits", "logprobs"]
    for name in [*single, "trace", "trace_time", "session", "save_every"]:
        if options[name] is not None:
            word = "PROMPT" if name == "prompt" else "--" + name.replace("_", "-")
            raise UsageError(f"{word} is for one prompt; it cannot be combined with --prompts")
    manner = Manner(
        max_tokens=options["max_tokens"],
        sampling=sampling,
        stop=options["stop"],
        ignore_eos=options["ignore_eos"],
        raw=options["raw"],
        system=options["system"],
        thinking=options["thinking"],
    )
    files = options["prompts"], options["out"]
    batch(_settings(options), *files, manner, options["progress"], options["quiet"])


def _sampling(options: dict[str, Any]) -> Sampling:
    """Raises UsageError."""
    from kimi_cli.sampler import Sampling

    return Sampling(
        temperature=options["temperature"],
        top_p=options["top_p"],
        top_k=options["top_k"],
        min_p=options["min_p"],
        seed=options["seed"],
    )


def _settings(options: dict[str, Any]) -> Settings:
    """Raises UsageError for two budgets."""
    from kimi_cli.answer import Settings
    from kimi_cli.errors import UsageError

    ram, preset = options.get("ram"), options.get("preset")
    if ram is not None and preset is not None:
        raise UsageError("--ram and --preset both name a memory limit: give one of them")
    return Settings(
        model=options["model"],
        trunk=options["trunk"],
        ram=ram or preset or 0,
        threads=options.get("threads"),
        chunk=options.get("prefill_chunk"),
        isa=options.get("isa", "auto"),
        context=options["context"],
    )
