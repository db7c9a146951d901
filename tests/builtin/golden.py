"""Reference vectors of the trained checkpoint, by the float64 model of `tests.reference_model`.

    python -m tests.builtin.golden MODEL OUT.npz      after tests.builtin.export

The engine proposes the continuation; the reference must choose the same ids by itself. Arrays as
in the golden files: prompt_ids [T], gen_ids [n], logits [T, vocab], gen_logits [n - 1, vocab],
routed_ids [layers, T + n - 1, k] ascending, -1 in a dense layer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.reference_model import ReferenceModel

PROMPT = "And God said unto Moses, Go in unto Pharaoh, and speak"
TOKENS = 16


def continuation(model: Path) -> tuple[list[int], list[int]]:
    """Prompt ids and greedy ids, as `kimi` has them."""
    words = ["generate", PROMPT, "--raw", "-m", str(model), "-n", str(TOKENS), "--json"]
    run = [sys.executable, "-c", "from kimi_cli.entry import main; main()"]
    done = subprocess.run(
        [*run, *words, "--ignore-eos", "--quiet"], capture_output=True, check=True
    )
    result = json.loads(done.stdout)
    return result["prompt_ids"], result["ids"]


def main(model: Path, out: Path) -> None:
    """Computes and writes the vectors. Raises ValueError where the reference chooses otherwise."""
    prompt, ids = continuation(model)
    config = json.loads((model / "config.json").read_bytes())
    reference = ReferenceModel(model, config).run([*prompt, *ids[:-1]])
    chosen = reference.logits[len(prompt) - 1 :].argmax(axis=1).tolist()
    if chosen != ids:
        raise ValueError(f"the reference chooses {chosen}, the engine {ids}")
    layers = config["text_config"]["num_hidden_layers"]
    k = config["text_config"]["num_experts_per_token"]
    routed = np.full((layers, len(prompt) + len(ids) - 1, k), -1, np.int32)
    for layer, chosen_ids in reference.routed.items():
        routed[layer] = chosen_ids
    np.savez_compressed(
        out,
        prompt_ids=np.array(prompt),
        gen_ids=np.array(ids),
        logits=reference.logits[: len(prompt)].astype(np.float32),
        gen_logits=reference.logits[len(prompt) :].astype(np.float32),
        routed_ids=routed,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
